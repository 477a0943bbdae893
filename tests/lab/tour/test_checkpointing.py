"""The stop of recomputation: its rows say what the schedules do. What compiles is held in tests/stack."""

from __future__ import annotations

import math
from typing import Any

import pytest

from jaxmem.lab.tour import checkpointing
from jaxmem.lab.tour.checkpointing import FORMULAS, POLICIES, by_policy


def test_what_is_kept_and_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def by_formula(policy: str, layers: int, target: str, *_: Any, host: tuple[str, ...] = (), **given: Any) -> Any:
        asked.append((policy, layers, target, host))
        kept = FORMULAS.get(policy, lambda n: 16 * n)(layers)
        held = {"temporaries": int(1000 * kept), "host": 1000 * len(host), "hidden": 1.0 if host else None}
        return {"policy": policy, "layers": layers, "flops": 100, "seconds": 1.0, "measured": None, **held}

    monkeypatch.setattr(checkpointing, "backward", by_formula)
    found = by_policy("rtx4090-24gb", depths=(4, 36))
    rows = {row["policy"]: row for row in found.tables[0].rows}
    assert tuple(rows) == POLICIES
    assert rows["none"]["again"] == 0
    assert rows["full"]["again"] == rows["full"]["kept"] == 36
    assert rows["sqrt"]["kept"] < 2 * math.sqrt(36) + 1
    assert rows["constant"]["again"] == 36 + 35 * 34 // 2 > 10 * rows["sqrt"]["again"]
    assert [row["name"] for row in found.tables[2].rows] == ["full", "full, on the host", "sqrt"]
    assert {target for _, _, target, _ in asked[-3:]} == {"rtx4090-24gb"}
    assert all(target == "cpu:1" for _, _, target, _ in asked[:-3])
    assert "48 times fewer bytes" in found.note
