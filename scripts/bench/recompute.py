"""The activations that N layers save under each recompute policy, and the arithmetic: docs/activations.md.

    python scripts/bench/recompute.py --json docs/benchmarks/recompute.json --png docs/recompute.png
    python scripts/bench/recompute.py --read docs/benchmarks/recompute.json --png docs/recompute.png  # recorded rows

The layers are those of llama3-8b in bfloat16, with one sequence of 2,048 tokens, compiled for a target that need not be
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="h100-80gb")
    parser.add_argument("--depths", nargs="+", type=int, default=[16, 64, 80, 256])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--png", type=Path)
    parser.add_argument("--read", type=Path, metavar="JSON", help="draw these rows instead of compiling; needs --png")
    args = parser.parse_args()
    if args.read and not args.png:
        parser.error("--read needs --png")
    devices.use_cpu_without_gpu(only_compile=True)
    if args.read:
        draw_rows(json.loads(args.read.read_text())["rows"], args.png)
        return
    rows, ideal = [], {}
    for policy in POLICIES:  # `none`, which recomputes nothing, is the first
        for layers in args.depths:
            row = backward(policy, layers, args.target, {}, 2048, trained=True)
            rows.append({**row, "ideal": ideal.setdefault(layers, row["flops"])})
            size = row["temporaries"] / 2**30
            ratio = row["flops"] / ideal[layers]
            print(f"{policy:10} {layers:4} layers: {size:7.3f} GiB, {ratio:6.3f} x", flush=True)
    if args.json:
        args.json.write_text(json.dumps({"target": args.target, "rows": rows}, indent=1) + "\n")
    if args.png:
        draw_rows(rows, args.png)


def draw_rows(rows: list[JsonDict], file: Path) -> None:
    memory, arithmetic = {}, {}
    for policy in POLICIES:
        policy_rows = [row for row in rows if row["policy"] == policy]
        memory[policy] = [(row["layers"], row["temporaries"] / 2**30) for row in policy_rows]
        arithmetic[policy] = [(row["layers"], row["flops"] / row["ideal"]) for row in policy_rows]
        if policy in FORMULAS:
            boundaries = [FORMULAS[policy](row["layers"]) for row in policy_rows]
            fixed = policy_rows[0]["temporaries"] - boundaries[0] * policy_rows[0]["boundary"]
            sizes = [(count * policy_rows[0]["boundary"] + fixed) / 2**30 for count in boundaries]
            memory[f"{policy}, formula"] = list(zip((row["layers"] for row in policy_rows), sizes, strict=True))
    panels = [
        LinePlot("Memory of the backward pass", "layers", "GiB", memory, "xy"),
        LinePlot("Arithmetic, relative to no recompute", "layers", "", arithmetic, "xy"),
    ]
    draw(file, panels)


if __name__ == "__main__":
    main()
