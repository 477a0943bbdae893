"""Files of the course run as their pages say, on a machine without a GPU; of longer ones, tests beside run parts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "topic",
    [
        "shardings", "pipeline", "cut", "float16", "chain", "roofline", "overlap", "sliding_max", "fusion",
        "quantization", "attention",
    ],
)  # fmt: skip
def test_a_file_of_the_course_runs(topic: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / f"scripts/course/{topic}.py")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / f"runs/tour/{topic}.png").is_file()
