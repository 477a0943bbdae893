"""The stop of attention: a whole table without a compiler's numbers, and errors that are measured."""

from __future__ import annotations

from typing import Any

import pytest

from jaxmem.errors import UserError
from jaxmem.lab.tour import attention
from jaxmem.lab.tour.attention import CASES, by_length


def test_every_way_is_compared_and_only_the_textbooks_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_formula(_: Any, lengths: Any) -> Any:
        for length in lengths:
            for way, size in (("reference", length**2), ("blockwise", 64 * length), ("triton", length)):
                yield {"of": length, "way": way, "temporaries": size}

    monkeypatch.setattr(attention, "_compiled", by_formula)
    found = by_length("rtx4090-24gb", lengths=(64, 256), here=())
    sizes, _, errors = found.tables
    assert "rtx4090-24gb" in sizes.title
    assert list(sizes.columns) == ["", "reference", "blockwise", "triton"]
    assert [line["of"] for line in errors.rows] == list(CASES)
    for line, bound in zip(errors.rows, (1e-5, 0.1, 1e-5), strict=True):
        written, *ours = line["ways"].values()
        assert (written["error"] is None) == (line["of"] != CASES[0])
        assert all(row["error"] < bound for row in ours)
    assert "fails in 2 of 3 cases" in found.note
    assert "grows 16 times, with the square of the length; a kernel's 4 times" in found.note


def test_a_cpu_has_no_memory_to_compile_for() -> None:
    with pytest.raises(UserError, match="tour attention compiles for a GPU, and runs here; give one, as h100-80gb"):
        by_length("cpu:8")
