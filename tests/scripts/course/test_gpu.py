"""The stop that counts bytes: every algorithm is counted, and what runs here is timed."""

import pytest

from jaxmem.errors import UserError
from jaxmem.machine.gpus import GPUS
from scripts.course import STOPS, gpu

STEP = [
    {"kernels": gpu.MATMULS, "TFLOP": 200.0, "bytes, GiB": 100.0, "time, ms": 300.0, "FLOP per byte": 2000.0},
    {"kernels": gpu.ELEMENTWISE, "TFLOP": 0.0, "bytes, GiB": 200.0, "time, ms": 100.0, "FLOP per byte": None},
]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(gpu, "NUMBERS", 2048)
    monkeypatch.setattr(gpu, "kernels_of", lambda _: STEP)


def test_every_algorithm_is_counted_and_what_runs_here_is_timed():
    tables = gpu.measure("rtx4090-24gb").tables
    rows = {next(iter(row.values())): row for table in tables for row in table.rows}
    timed = {name for name, row in rows.items() if row.get("here, ms") is not None}
    assert {name for name in rows if "CPU" in name or "XLA" in name} == timed
    straight, shared = (rows[f"GPU, {name}"]["bytes, MiB"] for name in ("straight", "shared"))
    assert straight > 90 * shared
    for name in ("float32", "bfloat16"):
        small, large = (rows[f"{name}, {tile}"] for tile in (64, 128))
        assert small["bytes, GiB"] == pytest.approx(2 * large["bytes, GiB"], rel=0.02)
        assert large["shared memory, KiB"] == 4 * small["shared memory, KiB"]
    one = rows["bfloat16, 16"]
    assert one["least time, ms"] == pytest.approx(1e3 * 2**30 * one["bytes, GiB"] / 1008e9)


def test_what_limits_a_step():
    found = gpu.measure("h100-80gb")
    assert [row["limited by"] for row in found.tables[-1].rows] == ["arithmetic", "memory"]


def test_the_nearer_a_memory_the_faster_and_the_smaller():
    for one in GPUS.values():
        levels = {row["memory"]: row for row in gpu.memory_levels(one)}
        speeds = [row["GB/s"] for row in levels.values() if row["GB/s"]]
        assert speeds == sorted(speeds, reverse=True)
        assert (
            max(levels[name]["size, MiB"] for name in ("shared memory", "L2 cache")) < levels["its memory"]["size, MiB"]
        )


def test_a_cpu_target_is_refused():
    with pytest.raises(UserError, match="gpu does not support --target cpu:8: it has no GPU"):
        STOPS["gpu"].visit("cpu:8")
