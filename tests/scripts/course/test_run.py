"""Commands of the course, each in this process and with less to compute: a figure is drawn. The other topics are
measured by the tests that have their names."""

import importlib
from functools import partial
from pathlib import Path
from typing import Any

import jax
import pytest

from scripts.course import checkpointing, main, overlap, parallel, quantization

SMALL = {"model": {"preset": "tiny"}}
LAYOUTS = ("ZeRO-3, no latency hiding", "tensor parallel")  # without XLA's scheduler, and with it
TRAINING = {"train": {"steps": 24, "evaluate_every": 24}}
# Each topic: constants of its module, and arguments of its command.
LESS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "pipeline": ({}, []),
    "chain": ({}, ["--layers", "6"]),
    "float16": ({}, ["--steps", "2"]),
    "roofline": ({"TARGETS": ("h100-80gb",) * 2}, []),  # one program
    "overlap": ({"LAYOUTS": {name: overlap.LAYOUTS[name] for name in LAYOUTS}}, []),
    "parallel": (
        {
            "LAYOUTS": {name: parallel.LAYOUTS[name] for name in ("data parallel", "tensor parallel")},
            "measure": partial(parallel.measure, base=parallel.BASE | SMALL),
        },
        [],
    ),
    "checkpointing": (
        {
            "POLICIES": ("none", "sqrt", "constant"),
            "OFFLOADED": {"full, offloaded": checkpointing.OFFLOADED["full, offloaded"]},
            "measure": partial(checkpointing.measure, depths=(4, 8)),
        },
        [],
    ),
    "sliding_max": ({"NUMBERS": 2048}, []),
    "fusion": ({"TOKENS": 64}, []),
    "quantization": ({"MODEL": "tiny", "SIZE": 128, "BITS": (8, 2), "TRAINED": quantization.TRAINED | TRAINING}, []),
}


@pytest.mark.exhaustive
@jax.numpy_dtype_promotion("standard")
@pytest.mark.parametrize("topic", LESS)
def test_a_file_of_the_course_runs(topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    constants, arguments = LESS[topic]
    module = importlib.import_module(f"scripts.course.{topic}")
    for name, value in constants.items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.chdir(tmp_path)
    main(f"scripts/course/{topic}.py", arguments)
    assert (tmp_path / f"runs/tour/{topic}.png").is_file()
