"""The notebook runs from its first cell to its last, with fewer updates."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.exhaustive
def test_the_notebook_runs(tmp_path: Path) -> None:
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    cells = json.loads((ROOT / "docs/how-to/plan.ipynb").read_text())["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    code = code.replace("train.steps=20", "train.steps=2").replace("optimizer.warmup=5", "optimizer.warmup=1")
    environment = os.environ | {"XLA_FLAGS": "--xla_backend_optimization_level=0"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs/notebook/metrics.jsonl").exists()
