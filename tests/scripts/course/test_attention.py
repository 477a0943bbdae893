"""The stop of attention: a whole table without a compiler's numbers, and measured errors."""

from typing import Any

import pytest

from jaxmem.errors import UserError
from scripts.course import STOPS, attention
from scripts.course.attention import CASES, FUSED, TEXTBOOK


def test_implementations_are_compared_and_only_the_textbook_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_formula(_: Any, length: int) -> Any:
        return {"reference": float(length**2), "blockwise": 64.0 * length, FUSED: float(length)}

    monkeypatch.setattr(attention, "_temporaries", by_formula)
    found = attention.measure("rtx4090-24gb", lengths=(64, 256), here=(32,))
    sizes, _, errors = found.tables
    assert "rtx4090-24gb" in sizes.title
    assert sizes.headings == ["tokens", "reference", "blockwise", FUSED]
    assert [row["case"] for row in errors.rows] == list(CASES)
    for row, bound in zip(errors.rows, (1e-5, 0.1, 1e-5), strict=True):
        assert (row[TEXTBOOK] == "not a number") == (row["case"] != CASES[0])
        assert max(row["reference"], row["blockwise"]) < bound


def test_a_cpu_target_is_refused() -> None:
    with pytest.raises(UserError, match="attention does not support --target cpu:8: it has no GPU"):
        STOPS["attention"].visit("cpu:8")
