"""The stop of the largest models: what is called the most fits, and little more does."""

from __future__ import annotations

import math
from typing import Any

import pytest

from jaxmem.errors import UserError
from jaxmem.lab.tour import compiled, frontier
from jaxmem.lab.tour.frontier import BASE, WAYS, by_memory

GIB = 2**30
LAYER = {"all weights": GIB, "all, in few bytes": GIB // 3, "LoRA": GIB // 4, "QLoRA": GIB // 16}


def estimate(way: str, layers: int, gpus: int) -> int:
    """Tables, layers that all GPUs split, and boundaries, which grow with the root of their number."""
    return 2 * GIB + layers * LAYER[way] // gpus + int(math.sqrt(layers) * GIB / 50)


def test_the_most_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_formula(aim: Any, _: Any, overrides: Any, layers: int) -> dict[str, Any]:
        (way,) = (name for name in WAYS if WAYS[name] == tuple(overrides))
        found = {"overrides": [f"model.layers={layers}"], "layers": layers, "parameters": layers * 10**8}
        return {**found, "estimate": estimate(way, layers, aim.count), "limit": aim.memory}

    monkeypatch.setattr(frontier, "_of_layers", by_formula)
    held = {"bytes_per_device": {"total": 20 * GIB}}
    monkeypatch.setattr(compiled, "plans", lambda _, cfgs: dict.fromkeys(cfgs, held))
    targets = ("rtx4060ti-16gb", "h100-80gb", "h100-80gb:128x8")
    found = by_memory("rtx4090-24gb", targets)
    largest, checked = (table.rows for table in found.tables)
    assert [row["target"] for row in largest] == [targets[0], "rtx4090-24gb", *targets[1:]]
    for row in largest:
        sizes = []
        for way, one in row["ways"].items():
            layers = one["layers"]
            assert estimate(way, layers, row["gpus"]) <= one["limit"]
            assert estimate(way, layers + max(1, layers // 30), row["gpus"]) > one["limit"]
            sizes.append(layers)
        assert sizes == sorted(sizes)
    assert [row["way"] for row in checked] == ["all weights", "QLoRA"]
    assert {row["target"] for row in checked} == {"rtx4090-24gb"}
    assert "h100-80gb:128x8, 1,024 GPUs, trains all of" in found.note


def test_where_nothing_fits_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    from jaxmem.planning.targets import parse_target

    full = {"limit": GIB}
    monkeypatch.setattr(
        frontier, "_of_layers", lambda *given: {**full, "layers": given[-1], "estimate": (1 + given[-1]) * GIB}
    )
    assert frontier._most(parse_target("rtx4090-24gb"), BASE, ()) is None


def test_a_cpu_is_no_target() -> None:
    with pytest.raises(UserError, match="tour frontier is about GPUs' memory; give one, as rtx4090-24gb"):
        by_memory("cpu:8")
