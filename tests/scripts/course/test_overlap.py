"""The stop of overlap: rows and seconds of a timeline, and which options a layout is compiled with."""

from typing import Any

import pytest

from jaxmem.config import load_config
from jaxmem.config.devices import for_devices
from jaxmem.errors import UserError
from jaxmem.planning.timeline import COMPUTE, KERNEL, NETWORK, WAIT, Span, Timeline
from scripts.course import STOPS, overlap
from scripts.course.panels import Spans

STEP = Timeline(
    seconds=2.0,
    arithmetic=1.5,
    spans=[Span(NETWORK, "all-gather", 0.0, 1.0), Span(COMPUTE, KERNEL, 0.0, 0.5), Span(COMPUTE, WAIT, 0.5, 1.0)],
)


def test_rows_of_a_schedule_are_drawn_in_milliseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {}
    monkeypatch.setattr(overlap, "schedule", lambda _, name, given: options.update({name: given}) or STEP)
    found = overlap.measure("h100-80gb")
    first, *others = overlap.LAYOUTS
    assert options[first] == {"xla_gpu_enable_latency_hiding_scheduler": False}
    assert not any(options[name] for name in others)
    panel = found.panels[0]
    assert isinstance(panel, Spans)
    assert panel.rows == {
        "compute": [(0.0, 500.0, KERNEL), (500.0, 1000.0, WAIT)],
        "communication": [(0.0, 1000.0, overlap.TRANSFER)],
    }
    assert panel.end == 2000
    assert {row["step, ms"] for row in found.tables[0].rows} == {2000.0}
    assert STOPS["overlap"].note.format(**found.facts)


def test_layouts_are_for_eight() -> None:
    for overrides in overlap.LAYOUTS.values():
        for_devices(load_config(overlap.BASE, overrides), overlap.GPUS)
    with pytest.raises(UserError, match="its layouts are for 8 GPUs; remove the number"):
        overlap.measure("h100-80gb:4")
