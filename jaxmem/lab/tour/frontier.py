"""How large a model may be: as many layers of llama3-8b as fit in memory, by method and hardware.

The arithmetic of `jaxmem fit` gives the bytes of a step for a number of layers without compiling it. On one target two
of the answers are compiled, to show how far the arithmetic is off; `jaxmem fit --maximize model.layers` compiles until
the number is exact.
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
from jaxmem.lab.tour.stop import Findings, gpu_target
from jaxmem.lab.tour.table import Row, Table
from jaxmem.planning import Target
from jaxmem.planning.targets import parse_target, usable_memory
from jaxmem.search.candidates import estimated

TARGET = "rtx4090-24gb"  # of what is compiled
TARGETS = (
    "rtx3080-10gb", "rtx4060ti-16gb", "rtx4090-24gb", "h100-80gb", "h100-80gb:8", "h100-80gb:8x8", "h100-80gb:128x8",
)  # fmt: skip
BASE = common.llm_config("llama3-8b", 2048, mesh={"fsdp": -1}, precision=common.BFLOAT16, memory={"remat": "sqrt"})
METHODS: dict[str, tuple[str, ...]] = {
    "AdamW": (),
    "APOLLO-Mini, int8": (
        "precision.parameters=int8", "precision.rounding=auto", "optimizer.name=apollo_mini",
        "optimizer.project_embeddings=true", "optimizer.clip_by=weight", "memory.update=during",
    ),
    "LoRA": ("adapter.kind=lora", "optimizer.name=adamw8bit"),
    "QLoRA": ("adapter.kind=qlora", "optimizer.name=adamw8bit"),
}  # fmt: skip


def measure(
    target: str | None = None,
    targets: Sequence[str] = TARGETS,
    methods: Mapping[str, Sequence[str]] = METHODS,
    base: Mapping[str, Any] = BASE,
) -> Findings:
    """The largest model of each target and method; the smallest and the largest of `target` are compiled."""
    aim, _ = gpu_target("frontier", target or TARGET)
    others = [one for one in map(parse_target, targets) if one.name != aim.name]
    row = _row(aim, methods, base)
    with ThreadPoolExecutor(1) as beside:  # the compilers are other processes
        compiling = beside.submit(_check, row, base)
        rows = sorted((row, *(_row(one, methods, base) for one in others)), key=lambda row: row["memory"])
        checked = compiling.result()
    sizes = [
        {"target": row["target"]}
        | {method: largest["parameters"] if largest else "none" for method, largest in row["largest"].items()}
        for row in rows
    ]
    series = {
        method: [
            (row["memory"] / 2**30, row["largest"][method]["parameters"] / 1e9)
            for row in rows
            if row["largest"][method]
        ]
        for method in methods
    }
    error = max(abs(row["predicted"] / row["compiled"] - 1) for row in checked)
    each = ", ".join(f"{row['method']} {row['limit'] / row['parameters']:.2f}" for row in checked)
    first, last, (full, *_, smallest) = rows[0], rows[-1], [*methods]
    formats = {**dict.fromkeys(("predicted", "compiled", "limit", "measured"), "GiB"), "overrides": None}
    return Findings(
        [
            Table(
                f"The largest model that fits, {base['data']['sequence_length']:,} tokens per GPU",
                sizes,
                dict.fromkeys(methods, "billions"),
            ),
            Table(f"On {aim.name}, compiled", checked, {**formats, "parameters": "billions"}),
        ],
        "Layers have the shape of llama3-8b's; embedding and output matrices are there once. On"
        f" {aim.name} two answers were compiled, and the arithmetic is {error:.1%} off at most. Bytes of memory per"
        f" parameter there: {each}. On one {first['target']} {smallest} reaches"
        f" {first['largest'][smallest]['parameters'] / 1e9:.1f} B parameters; {last['target']}, {last['gpus']:,} GPUs,"
        f" trains all weights of {last['largest'][full]['parameters'] / 1e9:,.0f} B. Weights, gradients and optimizer"
        " state are sharded over the GPUs; saved activations are each GPU's own.",
        [
            Lines(
                "The largest model that fits",
                "memory of all GPUs",
                "billions of parameters",
                series,
                "xy",
                {row["memory"] / 2**30: row["target"] for row in rows},
            )
        ],
    )


def _row(aim: Target, methods: Mapping[str, Sequence[str]], base: Mapping[str, Any]) -> dict[str, Any]:
    largest = {method: largest_model(aim, base, overrides) for method, overrides in methods.items()}
    return {"target": aim.name, "gpus": aim.count, "memory": aim.count * aim.memory, "largest": largest}


def largest_model(aim: Target, base: Mapping[str, Any], overrides: Sequence[str]) -> Row | None:
    """The most layers that fit, to 3% of many. Bytes are nearly linear in layers: each step follows the line through
    the two depths that are closest to the limit."""
    tried = {layers: _at_depth(aim, base, overrides, layers) for layers in (32, 64)}
    while True:
        near, other = sorted(tried.values(), key=lambda one: abs(_room(one)))[:2]
        slope = (near["predicted"] - other["predicted"]) / (near["layers"] - other["layers"])
        step = math.floor(_room(near) / slope)
        if 0 <= step < max(1, near["layers"] // 32):
            return near
        layers = max(1, near["layers"] + step)
        if layers in tried:  # one layer is too many, or the bytes are not linear here
            return max((one for one in tried.values() if _room(one) >= 0), key=lambda one: one["layers"], default=None)
        tried[layers] = _at_depth(aim, base, overrides, layers)


def _room(one: Row) -> int:
    return one["limit"] - one["predicted"]


def _at_depth(aim: Target, base: Mapping[str, Any], overrides: Sequence[str], layers: int) -> Row:
    overrides = [*overrides, f"model.layers={layers}", f"batch.global_size={aim.count}"]
    cfg = for_devices(load_config(dict(base), overrides), aim.count)
    assert isinstance(cfg.model, Decoder)
    size, predicted, limit = parameter_count(cfg.model), estimated(cfg, aim).total, usable_memory(aim, cfg)
    return {"overrides": overrides, "layers": layers, "parameters": size, "predicted": predicted, "limit": limit}


def _check(row: Row, base: Mapping[str, Any]) -> list[Row]:
    """The models of the first and the last method, compiled."""
    found = [(method, one) for method, one in row["largest"].items() if one]
    ends = dict((found[0], found[-1]))
    cfgs = {method: load_config(dict(base), one["overrides"]) for method, one in ends.items()}
    plans = common.plans(row["target"], cfgs)
    return [
        {"method": method, **one, "compiled": plan["bytes_per_device"]["total"], "measured": plan.get("measured")}
        for (method, one), plan in zip(ends.items(), plans.values(), strict=True)
    ]
