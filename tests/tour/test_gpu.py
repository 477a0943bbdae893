"""The stop that counts bytes: its table is whole, and agrees with the one in the docs."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxmem.errors import UserError
from jaxmem.tour import gpu

DOCS = Path(__file__).parents[2] / "docs/tour/gpu.md"


def test_every_way_is_counted_and_what_runs_here_is_timed(monkeypatch):
    monkeypatch.setattr(gpu, "NUMBERS", 2048)
    tables = gpu.bytes_counted("rtx4090-24gb").tables
    rows = {row["name"]: row for table in tables for row in table.rows}
    lines = [line for line in DOCS.read_text().splitlines() if line.startswith("| ")]
    named = [line.split(" | ")[0].removeprefix("| ") for line in lines]
    assert [name for name in named if name not in ("---", "way", "tiles")] == [*rows]
    timed = {name for name, row in rows.items() if row["seconds"] is not None}
    assert {name for name in rows if "CPU" in name or "XLA" in name} == timed
    straight, shared = (rows[f"GPU, {name}"]["bytes"] for name in ("straight", "shared"))
    assert straight > 90 * shared
    for name in ("float32", "bfloat16"):
        small, large = (rows[f"{name}, {tile}"] for tile in (64, 128))
        assert small["bytes"] == pytest.approx(2 * large["bytes"], rel=0.02)
        assert large["shared"] == 4 * small["shared"]
    one = rows["bfloat16, 16"]
    assert one["least_seconds"] == pytest.approx(one["bytes"] / 1008e9)


def test_a_cpu_is_no_gpu():
    with pytest.raises(UserError, match="target cpu:8: tour gpu counts what a GPU reads; give one, as h100-80gb"):
        gpu.bytes_counted("cpu:8")
