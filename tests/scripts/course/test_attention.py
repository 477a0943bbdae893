"""The stop of attention: temporary buffers that are compiled for a GPU, and measured errors."""

from pathlib import Path

import pytest

from jaxmem.errors import UserError
from scripts.course import STOPS
from scripts.course.attention import CASES, FUSED, TEXTBOOK


@pytest.mark.exhaustive
def test_implementations_are_compared_and_only_the_textbook_fails(tmp_path: Path) -> None:
    visit = STOPS["attention"].visit("rtx4090-24gb", lengths=(1024, 2048), here=(32,))
    sizes, _, errors = visit.findings.tables
    assert "rtx4090-24gb" in sizes.title
    assert sizes.headings == ["tokens", "reference", "blockwise", FUSED]
    growth = visit.findings.facts["growth"]
    assert growth["reference"] > 3.5 > 2.5 > growth["blockwise"]  # all scores, or a block of them
    assert growth["reference"] > 3.5 > 2.5 > growth[FUSED]
    assert [row["case"] for row in errors.rows] == list(CASES)
    for row, bound in zip(errors.rows, (1e-5, 0.1, 1e-5), strict=True):
        assert (row[TEXTBOOK] == "not a number") == (row["case"] != CASES[0])
        assert max(row["reference"], row["blockwise"]) < bound
    assert visit.draw(tmp_path / "attention.png")


def test_a_cpu_target_is_refused() -> None:
    with pytest.raises(UserError, match="attention does not support --target cpu:8: it has no GPU"):
        STOPS["attention"].visit("cpu:8")
