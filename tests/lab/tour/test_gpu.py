"""The stop that counts bytes: its table is whole, and agrees with the one in the docs."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxmem.errors import UserError
from jaxmem.lab.tour import gpu, roofline
from jaxmem.machine.gpus import GPUS

DOCS = Path(__file__).parents[3] / "docs/tour/gpu.md"


STEP = [
    {"name": roofline.PRODUCTS, "flops": 2e14, "bytes": 1e11, "seconds": 0.3},
    {"name": roofline.ELEMENTWISE, "flops": 0.0, "bytes": 2e11, "seconds": 0.1},
]


def test_every_way_is_counted_and_what_runs_here_is_timed(monkeypatch):
    monkeypatch.setattr(gpu, "NUMBERS", 2048)
    monkeypatch.setattr(roofline, "operations", lambda _: STEP)
    levels, *tables = gpu.bytes_counted("rtx4090-24gb").tables
    rows = {row["name"]: row for table in tables for row in table.rows}
    named = [line.split(" | ")[0].removeprefix("| ") for line in DOCS.read_text().splitlines() if line.startswith("| ")]
    shown = {row["name"] for table in (levels, *tables) for row in table.rows}
    assert shown == {name for name in named if name in shown}
    timed = {name for name, row in rows.items() if "operations" in row and row["seconds"] is not None}
    assert {name for name in rows if "CPU" in name or "XLA" in name} == timed
    straight, shared = (rows[f"GPU, {name}"]["bytes"] for name in ("straight", "shared"))
    assert straight > 90 * shared
    for name in ("float32", "bfloat16"):
        small, large = (rows[f"{name}, {tile}"] for tile in (64, 128))
        assert small["bytes"] == pytest.approx(2 * large["bytes"], rel=0.02)
        assert large["shared"] == 4 * small["shared"]
    one = rows["bfloat16, 16"]
    assert one["least_seconds"] == pytest.approx(one["bytes"] / 1008e9)


def test_what_a_step_waits_for(monkeypatch):
    monkeypatch.setattr(gpu, "NUMBERS", 2048)
    monkeypatch.setattr(roofline, "operations", lambda _: STEP)
    found = gpu.bytes_counted("h100-80gb")
    *_, step = found.tables
    assert [step.columns["wait for"](row) for row in step.rows] == ["arithmetic", "memory"]
    assert "spends 25% of its time in kernels that do wait" in found.note


def test_the_nearer_a_memory_the_faster_and_the_smaller():
    for one in GPUS.values():
        levels = {row["name"]: row for row in roofline.levels(one)}
        speeds = [row["speed"] for row in levels.values() if row["speed"]]
        assert speeds == sorted(speeds, reverse=True)
        assert max(levels[name]["bytes"] for name in ("shared memory", "L2 cache")) < levels["its memory"]["bytes"]


def test_a_cpu_is_no_gpu():
    with pytest.raises(UserError, match="target cpu:8: tour gpu counts what a GPU reads; give one, as h100-80gb"):
        gpu.bytes_counted("cpu:8")
