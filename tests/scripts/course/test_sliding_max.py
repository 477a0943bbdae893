"""Every algorithm gives the maximum of each window; it is counted, and timed if it runs here."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmem.errors import UserError
from scripts.course import STOPS, sliding_max


@given(st.lists(st.integers(-9, 9).map(float), min_size=1, max_size=30), st.data())
def test_on_one_processor(x: list[float], data: st.DataObject) -> None:
    window = data.draw(st.integers(1, len(x)))
    expected = np.lib.stride_tricks.sliding_window_view(np.asarray(x), window).max(1).tolist()
    assert {name: run(x, window) for name, run in sliding_max.ON_CPU.items()} == dict.fromkeys(
        sliding_max.ON_CPU, expected
    )


def test_by_xla() -> None:
    x = np.random.default_rng(0).standard_normal(400).astype(np.float32)
    expected = np.lib.stride_tricks.sliding_window_view(x, sliding_max.WINDOW).max(1)
    np.testing.assert_array_equal(sliding_max.by_xla(x), expected)


def test_bytes() -> None:
    assert sliding_max.requested_bytes("straight", 1000, 100) == 4 * 901 * 101
    assert sliding_max.requested_bytes("shared", 10**6, 513) == pytest.approx(4 * 3 * 10**6, rel=0.01)


def test_every_algorithm_is_counted_and_what_runs_here_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sliding_max, "NUMBERS", 2048)
    findings = sliding_max.measure("rtx4090-24gb")
    rows = {row["algorithm"]: row for row in findings.tables[0].rows}
    timed = {name for name, row in rows.items() if row["here, ms"] is not None}
    assert timed == {name for name in rows if "CPU" in name or "XLA" in name}
    straight, shared = (rows[f"GPU, {kind}"] for kind in ("straight", "shared"))
    assert straight["bytes, MiB"] > 90 * shared["bytes, MiB"]
    assert straight["least time, ms"] == pytest.approx(1e3 * 2**20 * straight["bytes, MiB"] / 1008e9)


def test_a_cpu_target_is_refused() -> None:
    with pytest.raises(UserError, match="sliding_max does not support --target cpu:8: it has no GPU"):
        STOPS["sliding_max"].visit("cpu:8")
