"""The largest model for each target and method; for `target`, the models of the first and last method are compiled."""

import bisect
import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from jaxmem.config import load_config
from jaxmem.config.devices import for_devices
from jaxmem.config.presets import PRESETS
from jaxmem.planning.budget import estimated
from jaxmem.planning.targets import Target, parse_target, usable_memory
from jaxmem.typing import JsonDict
from scripts.course import Findings, common, main
from scripts.course.panels import LinePlot
from scripts.course.table import Row, Table, gib

TARGETS = ("rtx3080-10gb", "rtx4060ti-16gb", "rtx4090-24gb", "a100-40gb", "h100-80gb", "h100-80gb:8", "h100-80gb:8x8")
# Layers by width: those of Llama 3 with 1, 3, 8, 70 and 405 B parameters, continued to 1,000 B, where the search ends:
# the largest published dense model has 540 B (PaLM).
DEPTHS = {2048: 16, 3072: 28, 4096: 32, 8192: 80, 16_384: 126, 22_528: 160}
HEAD = 128  # features of a head


def _shapes() -> Iterator[tuple[int, int]]:
    """(width, layers) in increasing order: between two widths only the number of layers grows."""
    widths = range(min(DEPTHS), max(DEPTHS) + 1, 512)
    depths = [round(depth) for depth in np.interp(widths, list(DEPTHS), list(DEPTHS.values()))]
    for (width, first), (_, end) in itertools.pairwise(zip(widths, depths, strict=True)):
        yield from ((width, layers) for layers in range(first, end))
    yield widths[-1], depths[-1]


SHAPES = tuple(_shapes())


def _fields(width: int, layers: int) -> dict[str, int]:
    """The fields of llama3-8b that a shape changes. There are 4 KV heads, as in Qwen 2.5 7B, if the number of heads is
    not divisible by 8."""
    heads = width // HEAD
    return {"layers": layers, "embed": width, "mlp": width * 7 // 2, "heads": heads, "kv_heads": 4 if heads % 8 else 8}


def _parameters(width: int, layers: int) -> int:
    shape = _fields(width, layers)
    attention = 2 * width * (width + shape["kv_heads"] * HEAD)
    norms = 2 * layers + 1
    vocab = PRESETS["llama3-8b"]["vocab"]
    return width * (layers * 3 * shape["mlp"] + norms + 2 * vocab) + layers * attention


BASE = common.CONFIGS["frontier"]["base"]
METHODS = common.rows_of("frontier", "methods")


def measure(target: str, targets: Sequence[str] = TARGETS) -> Findings:
    main_target = parse_target(target)
    aims = [main_target, *(aim for aim in map(parse_target, targets) if aim.name != main_target.name)]

    largest_models = {
        aim: {method: largest_model(aim, overrides) for method, overrides in METHODS.items()} for aim in aims
    }
    checked = _compiled(main_target, largest_models[main_target])
    rows: list[JsonDict] = [
        {"target": aim.name, "GPUs": aim.count, "memory, GiB": gib(aim.count * aim.memory)}
        | {method: row and row["parameters"] / 1e9 for method, row in models.items()}
        for aim, models in sorted(largest_models.items(), key=lambda item: item[0].count * item[0].memory)
    ]
    table = Table(f"Billions of parameters that fit, {BASE['data']['sequence_length']:,} tokens per GPU", rows)
    error = max(abs(row["predicted, GiB"] / row["compiled, GiB"] - 1) for row in checked)
    beyond = [row["method"] for row in checked if row["compiled, GiB"] > row["limit, GiB"]]
    series = {name: [(row["memory, GiB"], row[name]) for row in rows if row[name]] for name in METHODS}
    first, last = (_parameters(*SHAPES[number]) / 1e9 for number in (0, -1))
    return Findings(
        [table, Table(f"On {main_target.name}, compiled", checked)],
        {"first": first, "last": last, "error": error, "beyond": ", ".join(beyond) or "none"},
        [LinePlot(table.title, "memory of all GPUs, GiB", "billions of parameters", series, "xy")],
    )


def largest_model(aim: Target, overrides: Sequence[str]) -> Row | None:
    """The largest of SHAPES that fits; None if the smallest does not fit."""
    tried: dict[int, Row] = {}

    def is_too_large(number: int) -> bool:
        tried[number] = row = _row_of_shape(aim, overrides, *SHAPES[number])
        return bool(row["predicted"] > row["limit"])

    return tried.get(bisect.bisect_left(range(len(SHAPES)), True, key=is_too_large) - 1)


def _row_of_shape(aim: Target, overrides: Sequence[str], width: int, layers: int) -> Row:
    shape = _fields(width, layers)
    overrides = [*overrides, *(f"model.{name}={size}" for name, size in shape.items())]
    overrides.append(f"batch.global_size={aim.count}")
    cfg = for_devices(load_config(BASE, overrides), aim.count)
    size = _parameters(width, layers)
    predicted = estimated(cfg, aim).total
    limit = usable_memory(aim, cfg.memory)
    return {**shape, "overrides": overrides, "parameters": size, "predicted": predicted, "limit": limit}


def _compiled(aim: Target, largest: Mapping[str, Row | None]) -> list[Row]:
    """Plans of two of the largest models: those of the first and of the last method for which any model fits."""
    fitting = [(method, row) for method, row in largest.items() if row]
    ends: JsonDict = dict((fitting[0], fitting[-1]))
    plans = common.plans(aim.name, BASE, {method: row["overrides"] for method, row in ends.items()})
    return [
        {
            "method": method,
            "width": row["embed"],
            "layers": row["layers"],
            "billions of parameters": row["parameters"] / 1e9,
            "bytes per parameter": aim.count * row["limit"] / row["parameters"],
            "predicted, GiB": gib(row["predicted"]),
            "compiled, GiB": gib(plans[method]["bytes_per_device"]["total"]),
            "limit, GiB": gib(row["limit"]),
        }
        for method, row in ends.items()
    ]


if __name__ == "__main__":
    main(__file__)
