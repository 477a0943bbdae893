"""How large a model may be: layers of llama3-8b, as many as a device has memory for, by what learns and how.

The arithmetic of `jaxmem fit` for every target: of a number of layers the bytes of a step, without compiling, and from
two of them the most that fit. On one target two answers are compiled, and say how far the arithmetic is off; `jaxmem
fit --maximize model.layers` compiles until it knows the number exactly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from jaxmem.config import Decoder, load_config
from jaxmem.config.devices import for_devices
from jaxmem.errors import UserError
from jaxmem.lab.tour import compiled
from jaxmem.lab.tour.stops import Columns, Found, Row, Shown, Stop

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from jaxmem.planning import Target

TARGET = "rtx4090-24gb"  # of what is compiled
TARGETS = (
    "rtx3080-10gb", "rtx4060ti-16gb", "rtx4090-24gb", "h100-80gb", "h100-80gb:8", "h100-80gb:8x8", "h100-80gb:128x8",
)  # fmt: skip
BASE: dict[str, Any] = {
    "name": "tour",
    "model": {"preset": "llama3-8b"},
    "data": {"source": "tokens", "path": "unused", "sequence_length": 2048},
    "batch": {"global_size": 1},
    "mesh": {"fsdp": -1},
    "precision": {"parameters": "bfloat16", "rounding": "stochastic"},
    "memory": {"remat": "sqrt"},
    "train": {"steps": 1000},
}
WAYS: dict[str, tuple[str, ...]] = {
    "all weights": (),
    "all, in few bytes": (
        "precision.parameters=int8", "precision.rounding=auto", "optimizer.name=apollo_mini",
        "optimizer.project_embeddings=true", "optimizer.clip_by=weight", "memory.update=during",
    ),
    "LoRA": ("adapter.kind=lora", "optimizer.name=adamw8bit"),
    "QLoRA": ("adapter.kind=qlora", "optimizer.name=adamw8bit"),
}  # fmt: skip


def by_memory(
    target: str | None = None,
    targets: Sequence[str] = TARGETS,
    ways: Mapping[str, Sequence[str]] = WAYS,
    base: Mapping[str, Any] = BASE,
) -> Found:
    """Of each target and way the largest model; those of `target` are compiled."""
    from jaxmem.planning.targets import parse_target

    aim = parse_target(target or TARGET)
    if aim.gpu is None:
        raise UserError(f"target {target}: tour frontier is about GPUs' memory; give one, as {TARGET}")
    others = [one for one in map(parse_target, targets) if one.name != aim.name]
    row = _row(aim, ways, base)
    with ThreadPoolExecutor(1) as beside:  # compilers are other processes
        compiling = beside.submit(_checked, row, base)
        rows = sorted((row, *(_row(one, ways, base) for one in others)), key=lambda row: row["memory"])
        checked = compiling.result()
    columns: Columns = {"target": lambda row: row["target"]}
    for way in ways:
        columns[f"{way}, B"] = partial(_billions, way=way)
    held: Columns = {
        "what learns": lambda row: row["way"],
        "layers": lambda row: str(row["layers"]),
        "estimate, GiB": lambda row: f"{row['estimate'] / 2**30:.2f}",
        "compiled, GiB": lambda row: f"{row['compiled'] / 2**30:.2f}",
        "there is": lambda row: f"{row['limit'] / 2**30:.2f}",
    }
    held |= compiled.measured(checked)
    length = base["data"]["sequence_length"]
    tables = [
        Shown(f"The largest model that fits, in billions of weights; {length:,} tokens a GPU", rows, columns),
        Shown(f"On {aim.name}, compiled", checked, held),
    ]
    return Found(tables, _note(rows, checked), partial(_draw, rows=rows))


def _billions(row: Row, way: str) -> str:
    found = row["ways"][way]
    return f"{found['parameters'] / 1e9:,.1f}" if found else "none"


def _row(aim: Target, ways: Mapping[str, Sequence[str]], base: Mapping[str, Any]) -> Row:
    found = {way: _most(aim, base, overrides) for way, overrides in ways.items()}
    return {"target": aim.name, "gpus": aim.count, "memory": aim.count * aim.memory, "ways": found}


def _most(aim: Target, base: Mapping[str, Any], overrides: Sequence[str]) -> Row | None:
    """The most layers that the arithmetic lets fit, to 3 % of many: bytes are close to a straight line in layers, and a
    step along it leads from the two depths that are closest to the next."""
    tried = {layers: _of_layers(aim, base, overrides, layers) for layers in (32, 64)}
    while True:
        near, other = sorted(tried.values(), key=lambda one: abs(_room(one)))[:2]
        slope = (near["estimate"] - other["estimate"]) / (near["layers"] - other["layers"])
        step = math.floor(_room(near) / slope)
        if 0 <= step < max(1, near["layers"] // 32):
            return near
        layers = max(1, near["layers"] + step)
        if layers in tried:  # one layer is too many, or the line is no line there
            return max((one for one in tried.values() if _room(one) >= 0), key=lambda one: one["layers"], default=None)
        tried[layers] = _of_layers(aim, base, overrides, layers)


def _room(one: Row) -> int:
    return one["limit"] - one["estimate"]


def _of_layers(aim: Target, base: Mapping[str, Any], overrides: Sequence[str], layers: int) -> Row:
    from jaxmem.config.presets import parameter_count
    from jaxmem.planning.targets import usable
    from jaxmem.search.candidates import estimated

    over = [*overrides, f"model.layers={layers}", f"batch.global_size={aim.count}"]
    cfg = for_devices(load_config(dict(base), over), aim.count)
    assert isinstance(cfg.model, Decoder)
    return {
        "overrides": over,
        "layers": layers,
        "parameters": parameter_count(cfg.model),
        "estimate": estimated(cfg, aim).total,
        "limit": usable(aim, cfg),
    }


def _checked(row: Row, base: Mapping[str, Any]) -> list[Row]:
    """What its first and its last model take when they are compiled."""
    found = [(way, one) for way, one in row["ways"].items() if one]
    ends = dict((found[0], found[-1]))
    plans = compiled.plans(row["target"], {way: load_config(dict(base), ends[way]["overrides"]) for way in ends})
    return [
        {
            "way": way,
            "target": row["target"],
            **one,
            "compiled": plans[way]["bytes_per_device"]["total"],
            "measured": plans[way].get("measured"),
        }
        for way, one in ends.items()
    ]


def _note(rows: Sequence[Row], checked: Sequence[Row]) -> str:
    off = max(abs(row["estimate"] / row["compiled"] - 1) for row in checked)
    first, last = rows[0], rows[-1]
    ways = list(first["ways"])
    small, large = first["ways"][ways[-1]], last["ways"][ways[0]]
    each = ", ".join(f"{row['way']} {row['limit'] / row['parameters']:.2f}" for row in checked)
    return (
        "Layers have the shape of llama3-8b's; embedding and output projection are there once. How many fit is what the"
        f" arithmetic of a search says; on {checked[0]['target']} two were compiled, and it is {off:.1%} off at most."
        f" Bytes of memory for each weight, there: {each}. On one {first['target']} {ways[-1]} reaches"
        f" {small['parameters'] / 1e9:.1f} B weights; {last['target']}, {last['gpus']:,} GPUs, trains all of"
        f" {large['parameters'] / 1e9:,.0f} B. Several GPUs split weights, gradients and state; what layers keep of its"
        " own tokens each has for itself."
    )


def _draw(drawn: Figure, rows: Sequence[Row]) -> None:
    axes = drawn.subplots()
    for way in rows[0]["ways"]:
        own = [(row["memory"] / 2**30, row["ways"][way]["parameters"] / 1e9) for row in rows if row["ways"][way]]
        axes.plot(*zip(*own, strict=True), "o-", label=way)
    axes.set(xscale="log", yscale="log", xlabel="GiB of all GPUs together", ylabel="billions of weights")
    axes.grid(alpha=0.3)
    above = axes.secondary_xaxis("top")
    above.set_xticks([row["memory"] / 2**30 for row in rows], [row["target"] for row in rows])
    above.tick_params(rotation=45, labelsize=8)
    for label in above.get_xticklabels():
        label.set(ha="left")
    above.minorticks_off()
    axes.legend()


STOP = Stop(
    "frontier",
    "the largest model that fits, from a laptop's GPU to 1,024 H100s",
    by_memory,
    uses="compiler",
    config=["memory.update=during", "adapter.kind=qlora", "mesh.fsdp=-1"],
    read=["jaxmem/search/most.py", "jaxmem/planning/predict.py"],
)
