"""What N layers hold for the backward pass under each recomputation policy, and what they compute again.

    python scripts/measure/recompute.py --json docs/benchmarks/recompute.json --png docs/recompute.png

Layers of llama3-8b's shape in bfloat16 and one sequence of 2,048 tokens, compiled for a target that need not be
present. The bytes are those of the gradient with respect to the input of the stack, the arithmetic is that of the
gradient with respect to the weights as well. Ten seconds of a core for each.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import parser

from jaxmem.lab.tour.checkpointing import FORMULAS, POLICIES, backward
from jaxmem.machine import devices
from jaxmem.report.matplotlib_figure import figure


def draw(rows: Sequence[dict[str, Any]], file: Path) -> None:
    with figure(file, 9, 4) as canvas:
        memory, time = canvas.subplots(1, 2)
        for policy in dict.fromkeys(row["policy"] for row in rows):
            own = [row for row in rows if row["policy"] == policy]
            depths = [row["layers"] for row in own]
            (line,) = memory.plot(depths, [row["temporaries"] / 2**30 for row in own], "o-", label=policy)
            if policy in FORMULAS:
                boundary = own[0]["boundary"]
                fixed = own[0]["temporaries"] - FORMULAS[policy](depths[0]) * boundary
                formula = [(FORMULAS[policy](layers) * boundary + fixed) / 2**30 for layers in depths]
                memory.plot(depths, formula, ":", color=line.get_color())
            time.plot(depths, [row["flops"] / row["ideal"] for row in own], "o-", label=policy)
        ticks = sorted({row["layers"] for row in rows})
        for axes, title in ((memory, "GiB for the backward pass (dotted: formula)"), (time, "arithmetic, ideal = 1")):
            axes.set(xscale="log", yscale="log", xlabel="layers", title=title)
            axes.set_xticks(ticks, [str(layers) for layers in ticks])
            axes.minorticks_off()
            axes.grid(alpha=0.3)
        memory.legend()


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--target", default="h100-80gb")
    options.add_argument("--policies", nargs="+", default=POLICIES)
    options.add_argument("--depths", nargs="+", type=int, default=[16, 64, 80, 256])
    options.add_argument("--json", type=Path)
    options.add_argument("--png", type=Path)
    args = options.parse_args()
    devices.use_cpu_without_gpu(only_compile=True)
    rows: list[dict[str, Any]] = []
    for layers in args.depths:
        ideal = None  # operations without recomputation, where the policy `none` is among them
        for policy in args.policies:
            row = backward(policy, layers, args.target, shape={}, time=2048)
            ideal = row["flops"] if policy == "none" else ideal
            rows.append({**row, "ideal": ideal or row["flops"]})
            ratio = row["flops"] / rows[-1]["ideal"]
            print(f"{policy:10} {layers:4} layers: {row['temporaries'] / 2**30:7.3f} GiB, {ratio:6.3f} x", flush=True)
    if args.json:
        args.json.write_text(json.dumps({"target": args.target, "rows": rows}, indent=1) + "\n")
    if args.png:
        draw(rows, args.png)


if __name__ == "__main__":
    main()
