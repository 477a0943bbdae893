"""The stop of rooflines: kernels are named by their source and counted, and no rate is above the roof."""

from types import SimpleNamespace
from typing import Any

import pytest

from jaxmem.machine.gpus import GPUS
from jaxmem.planning.hlo import Frame
from scripts.course import STOPS, roofline
from scripts.course.panels import LinePlot
from scripts.course.roofline import Kernel


def instruction(function: str, opcode: str = "fusion", inner: Any = (), elements: int = 1) -> Any:
    return SimpleNamespace(
        frames=(Frame("file.py", function, 1),),
        opcode=opcode,
        op_name="",
        operands=[],
        shape=SimpleNamespace(elements=elements),
        inner=lambda: iter(inner),
    )


STEP = [
    Kernel(instruction("GatedMlp.__call__"), 32, 0.2, 10**14, 10**11),
    Kernel(instruction("RMSNorm.__call__", inner=[instruction("x", "multiply", elements=500)]), 2, 0.1, 0, 1000),
    Kernel(instruction("apply_call"), 1, 0.05, 0, 10**9),
    Kernel(instruction("unknown"), 1, 0.01, 0, 10**9),
]


def test_kernels_are_named_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "kernels", lambda _: STEP)
    found = roofline.measure()
    table = found.tables[-2]
    rows = {row["kernel"]: row for row in table.rows}
    assert list(rows) == ["MLP matmuls", "norms", "copies of a layer's weights"]  # by time, without the others
    assert rows["MLP matmuls"]["operations per byte"] == 1000
    assert rows["norms"]["operations per byte"] == 1  # 2 runs of 500 multiplications
    assert [row["limited by"] for row in rows.values()] == ["arithmetic", "memory", "memory"]
    assert found.facts["memory_h100"] == pytest.approx(0.16 / 0.36)
    assert STOPS["roofline"].note.format(**found.facts)
    roof = found.panels[0]
    assert isinstance(roof, LinePlot)
    assert "copies of a layer's weights" not in roof.series


def test_a_multiprocessor() -> None:
    row = roofline.multiprocessor(GPUS["h100-80gb"])
    assert (row["warps"], row["registers, KiB"], row["registers per thread of all warps"]) == (64, 256, 32)
    assert row["float32, TFLOP/s of the GPU"] == pytest.approx(67, rel=0.01)  # as NVIDIA's data sheet says
    assert roofline.multiprocessor(GPUS["a100-80gb"])["float32, TFLOP/s of the GPU"] == pytest.approx(19.5, rel=0.01)
    for gpu in GPUS.values():
        row = roofline.multiprocessor(gpu)
        assert row["shared at most, KiB"] < row["L1 and shared memory, KiB"]


def test_tiles_of_twice_the_size_halve_the_bytes_and_need_four_times_the_shared_memory() -> None:
    small, large = (row for row in roofline.tiles() if row["tiles"] in (64, 128))
    for dtype in ("float32", "bfloat16"):
        assert small[f"{dtype}, GiB"] == pytest.approx(2 * large[f"{dtype}, GiB"], rel=0.02)
        assert large[f"{dtype}, KiB"] == 4 * small[f"{dtype}, KiB"]


def test_the_nearer_a_memory_the_faster_and_the_smaller() -> None:
    for gpu in GPUS.values():
        levels = {row["memory"]: row for row in roofline.memory_levels(gpu)}
        speeds = [row["GB/s"] for row in levels.values() if row["GB/s"]]
        assert speeds == sorted(speeds, reverse=True)
        sizes = [levels[name]["size, MiB"] for name in ("shared memory", "L2 cache")]
        assert max(sizes) < levels["its memory"]["size, MiB"]
