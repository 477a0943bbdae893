"""The stop of memory over a step: the figure and the row of a plan, without a compiler."""

import pytest

from scripts.course import common, peak

MEMORY = {
    "seconds": 2.0,
    "passes": [{"name": "forward", "begin": 0.0, "end": 0.5}, {"name": "backward", "begin": 0.5, "end": 1.0}],
    "bands": ["weights", "logits"],
    "columns": [[0.0, 2**30, 0], [0.6, 2**30, 2**31]],
    "peak": [0.6, 2**30, 2**31],
    "largest_made": [{"what": "f32[8]", "band": "logits"}],
}


def test_the_peak_is_described_and_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "plans", lambda _, __, rows: {name: {"memory": MEMORY} for name in rows})
    found = peak.measure("h100-80gb")
    row = found.tables[0].rows[0]
    assert (row["peak, GiB"], row["in the pass"], row["weights, GiB"], row["logits, GiB"]) == (
        3.0,
        "backward",
        1.0,
        2.0,
    )
    assert [panel.title for panel in found.panels] == list(peak.POLICIES)
    areas = found.panels[0]
    assert isinstance(areas, peak.Areas)
    assert (areas.begins, areas.end) == ([0.0, 1.2], 2.0)
    assert areas.areas == {"weights": [1.0, 1.0], "logits": [0.0, 2.0]}
