"""The activations that N layers save under each recompute policy, and the arithmetic: docs/activations.md.

    python scripts/bench/recompute.py            # prints the rows
    python scripts/bench/recompute.py --write    # and writes docs/benchmarks/recompute.json and docs/recompute.png
    python scripts/bench/recompute.py --draw     # draws the recorded rows again

The layers are those of llama3-8b in bfloat16, with one sequence of 2,048 tokens, compiled for an H100 that need not be
installed. The bytes are those of the gradient with respect to the input of the layers; the arithmetic also has the
gradient with respect to the weights. A row takes ten seconds on one core.
"""

import argparse
import json
from pathlib import Path

from jaxmem.machine import devices
from jaxmem.typing import JsonDict
from scripts.course.checkpointing import FORMULAS, POLICIES, backward
from scripts.course.panels import LinePlot, draw

DOCS = Path(__file__).parents[2] / "docs"
RECORD = DOCS / "benchmarks/recompute.json"
TARGET = "h100-80gb"
DEPTHS = (16, 64, 80, 256)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="record the rows, and draw them")
    parser.add_argument("--draw", action="store_true", help="draw the recorded rows instead of compiling")
    options = parser.parse_args()
    devices.use_cpu_without_gpu(only_compile=True)
    rows = json.loads(RECORD.read_text())["rows"] if options.draw else compiled_rows()
    if options.write:
        RECORD.write_text(json.dumps({"target": TARGET, "rows": rows}, indent=1) + "\n")
    if options.write or options.draw:
        draw_rows(rows, DOCS / "recompute.png")


def compiled_rows() -> list[JsonDict]:
    rows, ideal = [], {}
    for policy in POLICIES:  # `none`, which recomputes nothing, is the first
        for layers in DEPTHS:
            row = backward(policy, layers, TARGET, {}, 2048, trained=True)
            rows.append({**row, "ideal": ideal.setdefault(layers, row["flops"])})
            size = row["temporaries"] / 2**30
            ratio = row["flops"] / ideal[layers]
            print(f"{policy:10} {layers:4} layers: {size:7.3f} GiB, {ratio:6.3f} x", flush=True)
    return rows


def draw_rows(rows: list[JsonDict], file: Path) -> None:
    memory, arithmetic = {}, {}
    for policy in POLICIES:
        policy_rows = [row for row in rows if row["policy"] == policy]
        memory[policy] = [(row["layers"], row["temporaries"] / 2**30) for row in policy_rows]
        arithmetic[policy] = [(row["layers"], row["flops"] / row["ideal"]) for row in policy_rows]
        if policy in FORMULAS:
            first = policy_rows[0]
            fixed = first["temporaries"] - FORMULAS[policy](first["layers"]) * first["boundary"]
            memory[f"{policy}, formula"] = [
                (row["layers"], (FORMULAS[policy](row["layers"]) * first["boundary"] + fixed) / 2**30)
                for row in policy_rows
            ]
    panels = [
        LinePlot("Memory of the backward pass", "layers", "GiB", memory, "xy"),
        LinePlot("Arithmetic, relative to no recompute", "layers", "", arithmetic, "xy"),
    ]
    draw(file, panels)


if __name__ == "__main__":
    main()
