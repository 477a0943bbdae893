"""The stop of batch sizes: the most that fits fits, one more does not, and a step has at least its floor."""

from typing import Any

import pytest

from jaxmem.planning.targets import parse_target
from scripts.course import STOPS, batch_size, common

GIB = 2**30


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The rows that are compiled; each needs a gibibyte."""
    asked: dict[str, Any] = {}

    def plans(_target: str, _base: Any, rows: Any) -> dict[str, Any]:
        asked.update(rows)
        return {name: {"bytes_per_device": {"total": GIB}} for name in rows}

    monkeypatch.setattr(common, "plans", plans)
    return asked


@pytest.mark.exhaustive
def test_one_more_sequence_than_the_most_does_not_fit(
    compiled: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_size, "BATCHES", (1, 64))
    monkeypatch.setattr(batch_size, "MOST", 512)
    found = batch_size.measure("rtx4090-24gb")
    memory, most, checked = (table.rows for table in found.tables)
    for row in memory:
        assert row[batch_size.FLOOR] < row["full recompute"] < row["no recompute"]
    assert len({row[batch_size.FLOOR] for row in memory}) == 1
    for row in most[1:2]:
        aim = parse_target(batch_size.CARDS[row["GPU"]])
        for name, overrides in batch_size.POLICIES.items():
            sizes = [batch_size.estimate_batch(aim, overrides, row[name] + more).total / GIB for more in (0, 1)]
            assert sizes[0] <= row["usable, GiB"] < sizes[1]
    assert {row["policy"]: row["sequences"] for row in checked} == {name: most[1][name] for name in batch_size.POLICIES}
    assert all(f"batch.global_size={most[1][name]}" in compiled[name] for name in batch_size.POLICIES)
    assert STOPS["batch_size"].note.format(**found.facts)


@pytest.mark.exhaustive
def test_nothing_fits_below_the_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_size, "_usable", lambda _: GIB)
    assert batch_size.largest_batch(parse_target("rtx3080-10gb"), ()) == 0
