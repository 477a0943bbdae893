"""How large a model may be: as many layers of llama3-8b as fit in memory, by method and hardware.

The arithmetic of `jaxmem fit` estimates the bytes of a step for a number of layers without compiling it. On one target
two of the answers are compiled, to show how far the arithmetic is off; `jaxmem fit --maximize model.layers` compiles
until the number is exact.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jaxmem.config import Decoder, load_config
from jaxmem.config.devices import for_devices
from jaxmem.config.presets import parameter_count
from jaxmem.lab.tour import common
from jaxmem.lab.tour.panels import Lines
from jaxmem.lab.tour.stop import Findings
from jaxmem.lab.tour.table import Row, Table, gib
from jaxmem.planning import Target
from jaxmem.planning.targets import parse_target, usable_memory
from jaxmem.search.candidates import estimated

TARGETS = (
    "rtx3080-10gb", "rtx4060ti-16gb", "rtx4090-24gb", "h100-80gb", "h100-80gb:8", "h100-80gb:8x8", "h100-80gb:128x8",
)  # fmt: skip
BASE = common.llm_config("llama3-8b", 2048, mesh={"fsdp": -1}, precision=common.BFLOAT16, memory={"remat": "sqrt"})
METHODS: common.Overrides = {
    "AdamW": (),
    "APOLLO-Mini, int8": (
        *common.INT8, "optimizer.name=apollo_mini", "optimizer.project_embeddings=true", "optimizer.clip_by=weight",
        "memory.update=during",
    ),
    "LoRA": ("adapter.kind=lora", "optimizer.name=adamw8bit"),
    "QLoRA": ("adapter.kind=qlora", "optimizer.name=adamw8bit"),
}  # fmt: skip


def measure(target: str, targets: Sequence[str] = TARGETS) -> Findings:
    """The largest model of each target and method; on `target` those of the first and the last method are compiled."""
    own = parse_target(target)
    aims = [own, *(one for one in map(parse_target, targets) if one.name != own.name)]

    def largest(aim: Target) -> dict[str, Row | None]:
        return {method: largest_model(aim, overrides) for method, overrides in METHODS.items()}

    found = {own: largest(own)}
    with ThreadPoolExecutor(1) as background:  # the compilers are other processes
        compiling = background.submit(_compiled, own, found[own])
        found |= {aim: largest(aim) for aim in aims[1:]}
        checked = compiling.result()
    rows: list[dict[str, Any]] = [
        {"target": aim.name, "GPUs": aim.count, "memory, GiB": gib(aim.count * aim.memory)}
        | {method: one and one["parameters"] / 1e9 for method, one in models.items()}
        for aim, models in sorted(found.items(), key=lambda item: item[0].count * item[0].memory)
    ]
    table = Table(f"Billions of parameters that fit, {BASE['data']['sequence_length']:,} tokens per GPU", rows)
    error = max(abs(row["predicted, GiB"] / row["compiled, GiB"] - 1) for row in checked)
    series = {name: [(row["memory, GiB"], row[name]) for row in rows if row[name]] for name in METHODS}
    return Findings(
        [table, Table(f"On {own.name}, compiled", checked)],
        "Layers have the shape of llama3-8b's; there is one embedding and one output matrix. Weights, gradients and"
        " optimizer state are sharded over the GPUs; each GPU has saved activations of its own. Where a cell is empty,"
        f" one layer is too much. Two answers were compiled, and the arithmetic is {error:.1%} off at most.",
        [Lines(table.title, "memory of all GPUs, GiB", "billions of parameters", series, "xy")],
    )


def largest_model(aim: Target, overrides: Sequence[str]) -> Row | None:
    """The most layers that fit, to 3% of many. Bytes are nearly linear in layers: each step follows the line through
    the two depths that are closest to the limit."""
    tried = {layers: _at_depth(aim, overrides, layers) for layers in (32, 64)}
    while True:
        near, other = sorted(tried.values(), key=lambda one: abs(_room(one)))[:2]
        slope = (near["predicted"] - other["predicted"]) / (near["layers"] - other["layers"])
        step = math.floor(_room(near) / slope)
        if 0 <= step < max(1, near["layers"] // 32):
            return near
        layers = max(1, near["layers"] + step)
        if layers in tried:  # one layer is too many, or the bytes are not linear here
            return max((one for one in tried.values() if _room(one) >= 0), key=lambda one: one["layers"], default=None)
        tried[layers] = _at_depth(aim, overrides, layers)


def _room(one: Row) -> int:
    return one["limit"] - one["predicted"]


def _at_depth(aim: Target, overrides: Sequence[str], layers: int) -> Row:
    overrides = [*overrides, f"model.layers={layers}", f"batch.global_size={aim.count}"]
    cfg = for_devices(load_config(BASE, overrides), aim.count)
    assert isinstance(cfg.model, Decoder)
    size, predicted, limit = parameter_count(cfg.model), estimated(cfg, aim).total, usable_memory(aim, cfg)
    return {"overrides": overrides, "layers": layers, "parameters": size, "predicted": predicted, "limit": limit}


def _compiled(aim: Target, largest: Mapping[str, Row | None]) -> list[Row]:
    """The models of the first and the last method that has one."""
    fitting = [(method, one) for method, one in largest.items() if one]
    ends: dict[str, Any] = dict((fitting[0], fitting[-1]))
    plans = common.plans(aim.name, BASE, {method: one["overrides"] for method, one in ends.items()})
    return [
        {
            "method": method,
            "layers": one["layers"],
            "billions of parameters": one["parameters"] / 1e9,
            "bytes per parameter": one["limit"] / one["parameters"],
            "predicted, GiB": gib(one["predicted"]),
            "compiled, GiB": gib(plans[method]["bytes_per_device"]["total"]),
            "limit, GiB": gib(one["limit"]),
            "measured, GiB": gib(plans[method]["measured"]),
        }
        for method, one in ends.items()
    ]
