"""What N layers hold for the backward pass under each recomputation policy, and what they compute again.

    python scripts/measure/recompute.py --output docs/benchmarks/recompute.json --png docs/recompute.png

Layers of llama3-8b's shape in bfloat16, one sequence of 2,048 tokens, compiled for a target that need not be here: the
gradient by the first boundary for the bytes, and by the weights too for the arithmetic. Ten seconds of a core for each.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxmem.lab.tour.checkpointing import FORMULAS, POLICIES, backward
from jaxmem.machine import devices
from jaxmem.report.matplotlib_figure import figure


def rows(policies: Sequence[str], depths: Sequence[int], target: str, **size: Any) -> Iterator[dict[str, Any]]:
    for layers in depths:
        for policy in policies:
            yield backward(policy, layers, target, **size)


def draw(found: Sequence[dict[str, Any]], file: Path) -> None:
    with figure(file, 9, 4) as drawn:
        _draw(drawn, found)


def _draw(drawn: Any, found: Sequence[dict[str, Any]]) -> None:
    memory, time = drawn.subplots(1, 2)
    for policy in dict.fromkeys(one["policy"] for one in found):
        own = [one for one in found if one["policy"] == policy]
        depths = [one["layers"] for one in own]
        (line,) = memory.plot(depths, [one["temporaries"] / 2**30 for one in own], "o-", label=policy)
        if policy in FORMULAS:
            least = own[0]["temporaries"] - FORMULAS[policy](depths[0]) * own[0]["boundary"]
            formula = [(FORMULAS[policy](n) * own[0]["boundary"] + least) / 2**30 for n in depths]
            memory.plot(depths, formula, ":", color=line.get_color())
        time.plot(depths, [one["flops"] / one["ideal"] for one in own], "o-", label=policy)
    for axes, title in ((memory, "GiB for the backward pass (dotted: formula)"), (time, "arithmetic, ideal = 1")):
        axes.set(xscale="log", yscale="log", xlabel="layers", title=title)
        axes.set_xticks(
            sorted({one["layers"] for one in found}), [str(n) for n in sorted({one["layers"] for one in found})]
        )
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    memory.legend()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="h100-80gb")
    parser.add_argument("--policies", nargs="+", default=POLICIES)
    parser.add_argument("--depths", nargs="+", type=int, default=[16, 64, 80, 256])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--png", type=Path)
    given = parser.parse_args()
    devices.stay_on_cpu_without_gpu(only_compile=True)
    found = []
    for one in rows(given.policies, given.depths, given.target, shape={}, time=2048):
        ideal = next((old["flops"] for old in found if (old["policy"], old["layers"]) == ("none", one["layers"])), None)
        found.append({**one, "ideal": ideal or one["flops"]})
        kept = f"{one['temporaries'] / 2**30:7.3f} GiB, {one['flops'] / found[-1]['ideal']:6.3f} x"
        print(f"{one['policy']:10} {one['layers']:4} layers: {kept}", flush=True)
    if given.output:
        given.output.write_text(json.dumps({"target": given.target, "rows": found}, indent=1) + "\n")
    if given.png:
        draw(found, given.png)


if __name__ == "__main__":
    main()
