"""The stop of rooflines: kernels are named by their source and counted, and no rate is above the roof."""

from types import SimpleNamespace
from typing import Any

import pytest

from jaxmem.machine.gpus import GPUS
from jaxmem.planning.hlo import Frame
from scripts.course import STOPS, roofline
from scripts.course.gpu import Kernel
from scripts.course.panels import LinePlot


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
