"""The stop of the largest models: what is called the most fits, and little more does."""

from __future__ import annotations

import math
from typing import Any

import pytest

from jaxmem.errors import UserError
from jaxmem.lab.tour import common, find_stop, frontier
from jaxmem.lab.tour.frontier import METHODS
from jaxmem.planning.targets import parse_target

GIB = 2**30
LAYER = {"AdamW": GIB, "APOLLO-Mini, int8": GIB // 3, "LoRA": GIB // 4, "QLoRA": GIB // 16}


def estimate(method: str, layers: int, gpus: int) -> int:
    """Tables, layers that all GPUs split, and boundaries, which grow with the root of their number."""
    return 2 * GIB + layers * LAYER[method] // gpus + int(math.sqrt(layers) * GIB / 50)


def test_the_most_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_formula(aim: Any, overrides: Any, layers: int) -> dict[str, Any]:
        (method,) = (name for name in METHODS if METHODS[name] == tuple(overrides))
        found = {"overrides": [f"model.layers={layers}"], "layers": layers, "parameters": layers * 10**8}
        return {**found, "predicted": estimate(method, layers, aim.count), "limit": aim.memory}

    monkeypatch.setattr(frontier, "_at_depth", by_formula)
    held = {"bytes_per_device": {"total": 20 * GIB}, "measured": None}
    monkeypatch.setattr(common, "plans", lambda _target, _base, rows: dict.fromkeys(rows, held))
    targets = ("rtx4060ti-16gb", "h100-80gb", "h100-80gb:128x8")
    found = frontier.measure("rtx4090-24gb", targets)
    largest, checked = (table.rows for table in found.tables)
    assert [row["target"] for row in largest] == [targets[0], "rtx4090-24gb", *targets[1:]]
    for row in largest:
        aim, sizes = parse_target(row["target"]), []
        for method in METHODS:
            layers = round(10 * row[method])
            assert estimate(method, layers, aim.count) <= aim.memory
            assert estimate(method, layers + max(1, layers // 30), aim.count) > aim.memory
            sizes.append(layers)
        assert sizes == sorted(sizes)
    assert [row["method"] for row in checked] == ["AdamW", "QLoRA"]
    assert largest[-1]["GPUs"] == 1024


def test_where_nothing_fits_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    full = {"limit": GIB}
    monkeypatch.setattr(
        frontier,
        "_at_depth",
        lambda *arguments: {**full, "layers": arguments[-1], "predicted": (1 + arguments[-1]) * GIB},
    )
    assert frontier.largest_model(parse_target("rtx4090-24gb"), ()) is None


def test_a_cpu_is_no_target() -> None:
    with pytest.raises(UserError, match="tour frontier does not support --target cpu:8"):
        find_stop("frontier").visit("cpu:8")
