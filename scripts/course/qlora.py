"""A step for each format of the frozen weights, compiled for a GPU."""

import math
from collections.abc import Iterable

from jaxmem.config import load_config
from jaxmem.estimate.state import state_of
from jaxmem.typing import JsonView
from scripts.course import Findings, common, main
from scripts.course.panels import Bars
from scripts.course.table import Row, Table, gib

BASE = common.CONFIGS["qlora"]["base"]
BASES = common.rows_of("qlora", "bases")


def measure(target: str, base: JsonView = BASE, bases: common.Overrides = BASES) -> Findings:
    plans = common.plans(target, base, bases)
    table = Table(
        f"{common.title(base)} with adapters on {target}",
        [_row(base, base_name, bases[base_name], plans[base_name]) for base_name in bases],
    )
    first = table.rows[0]
    small = min(table.rows, key=lambda row: row["total, GiB"])
    shrunk = {name: first[name] / small[name] for name in ("frozen layers, GiB", "total, GiB")}
    trainable = plans[small["stored as"]]["model"]["trainable"]
    return Findings(
        [table],
        {"trainable": trainable / 1e6, "first": first, "small": small, "shrunk": shrunk},
        [Bars(table, list(table.rows[0])[2:6], "Memory of a step, GiB")],
    )


def _row(base: JsonView, name: str, overrides: Iterable[str], plan: JsonView) -> Row:
    state = state_of(load_config(dict(base), overrides), "cuda")
    stored = (*state.categories["parameters"], *state.categories["quantization"])
    frozen = [leaf for leaf in stored if "rank" not in leaf.axes]
    count = sum(math.prod(leaf.shape) for leaf in state.weights if "rank" not in leaf.axes)
    size = sum(leaf.itemsize * math.prod(leaf.shape) for leaf in frozen)
    vocabulary = sum(leaf.itemsize * math.prod(leaf.shape) for leaf in frozen if "vocab" in leaf.axes)
    sizes = plan["bytes_per_device"]
    trainable = sizes["parameters"] + sizes["quantization"] - size + sizes["gradients"] + sizes["optimizer"]
    return {
        "stored as": name,
        "bits per weight": 8 * size / count,
        "frozen layers, GiB": gib(size - vocabulary),
        "embedding and output, GiB": gib(vocabulary),
        "trainable, GiB": gib(trainable),
        "activations, GiB": gib(sizes["activations"]),
        "total, GiB": gib(sizes["total"]),
        "FLOP, times the minimum": plan["flops_per_device"] / plan["ideal_flops_per_device"],
    }


if __name__ == "__main__":
    main(__file__)
