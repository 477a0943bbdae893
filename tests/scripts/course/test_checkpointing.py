"""The stop of recomputation: its rows say what the schedules do. What compiles is held in tests/stack."""

import math
from typing import Any

import pytest

from scripts.course import checkpointing
from scripts.course.checkpointing import FORMULAS, POLICIES


def test_boundaries_and_recomputed_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def by_formula(policy: str, layers: int, target: str, *_: Any, host: tuple[str, ...] = (), **_options: Any) -> Any:
        calls.append((policy, layers, target, host))
        boundaries = FORMULAS.get(policy, lambda n: 16 * n)(layers)
        held = {"temporaries": int(1000 * boundaries), "host": 1000 * len(host), "hidden": 1.0 if host else None}
        return {"flops": 100, "seconds": 1.0, "measured": 1.0, **held}

    monkeypatch.setattr(checkpointing, "backward", by_formula)
    found = checkpointing.measure("rtx4090-24gb", depths=(4, 36))
    rows = {row["remat"]: row for row in found.tables[0].rows}
    assert tuple(rows) == POLICIES
    assert rows["none"]["recomputed"] == 0
    assert rows["full"]["recomputed"] == rows["full"]["boundaries"] == 36
    assert rows["sqrt"]["boundaries"] < 2 * math.sqrt(36) + 1
    assert rows["constant"]["recomputed"] == 36 + 35 * 34 // 2 > 10 * rows["sqrt"]["recomputed"]
    assert [row["remat"] for row in found.tables[1].rows] == ["full", "full, offloaded", "sqrt"]
    assert {target for _, _, target, _ in calls[-3:]} == {"rtx4090-24gb"}
    assert all(target == "cpu:1" for _, _, target, _ in calls[:-3])
