"""The stop of cut graphs: parts on devices compute what one device does, and no operation runs before its operands."""

from pathlib import Path

import pytest

from scripts.course import STOPS, cut
from scripts.course.cut import GRAPH, schedule


@pytest.mark.exhaustive
def test_parts_on_devices_have_the_loss_and_the_gradients_of_one_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cut, "IMAGES", 4)
    monkeypatch.setattr(cut, "SIDE", 8)
    visit = STOPS["cut"].visit(micro_batches=2)
    facts = visit.findings.facts
    assert facts["parts"] == pytest.approx(facts["loss"], rel=1e-5)
    assert facts["difference"] < 1e-5  # of gradients, relative to the largest of each array
    places, edges = visit.findings.tables
    for row, part in zip(places.rows, GRAPH.values(), strict=True):
        assert row["gradients are on"] == row["device"] == str(part.device)
    sent = {row["cut"]: row["sent, kB"] for row in edges.rows}
    for forward in ("stem to small", "stem to large", "small to head", "large to head"):
        source, _, target = forward.partition(" to ")
        assert sent[forward] == sent[f"{target} to {source}"]  # its gradient goes back
    assert visit.draw(tmp_path / "cut.png")


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_each_operation_runs_once_per_micro_batch_and_in_order(micro_batches: int) -> None:
    rows = list(schedule(micro_batches).values())
    for row in rows:
        assert row.count("F") == micro_batches
        assert row.count("B") == 2 * micro_batches
    stem, small, large, head = rows
    assert small == large  # the towers run at the same time
    assert stem.index("F") < small.index("F") < head.index("F") < head.index("B") < small.index("B") < stem.index("B")
    assert max(row.rindex("B") for row in rows) == stem.rindex("B")
