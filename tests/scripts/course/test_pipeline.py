"""The stop of pipelines: idle time and memory are those of the timetable that training uses."""

import pytest

from jaxmem.errors import UserError
from jaxmem.pipeline.timetable import timetable
from scripts.course.pipeline import count_saved, measure


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 1), (2, 6), (4, 8)])
def test_memory_of_stages(stages: int, micro_batches: int) -> None:
    assert count_saved(timetable("gpipe", stages, micro_batches)) == [micro_batches] * stages
    saved = count_saved(timetable("1f1b", stages, micro_batches))
    assert saved == [min(micro_batches, 2 * (stages - stage) - 1) for stage in range(stages)]
    assert max(saved) == timetable("1f1b", stages, micro_batches).slots.counts[0]


def test_rounds_need_a_multiple_of_the_stages() -> None:
    all_schedules, two = (measure(4, count).tables[0] for count in (8, 6))
    assert len(all_schedules.rows) == 4
    assert [row["schedule"] for row in two.rows] == ["GPipe", "1F1B"]
    for row in (*all_schedules.rows, *two.rows):
        assert row["idle, %"] == pytest.approx(row["formula, %"])


def test_numbers_below_one_are_refused() -> None:
    with pytest.raises(UserError, match="pipeline does not support --micro-batches 0; use 1 or more"):
        measure(4, 0)
