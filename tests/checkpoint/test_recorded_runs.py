"""Run directories that jaxmem wrote before its config keys were renamed: they resume, and their models open."""

import json
import shutil
import tarfile
from pathlib import Path

import jax
import pytest

from jaxmem.checkpoint import Checkpoints
from jaxmem.config import load_config
from jaxmem.inference.load import open_run
from jaxmem.training.run import run

DATA = Path(__file__).parent / "data"
RUNS = ("qlora", "galore")  # each trained 6 steps on one device; only the checkpoint of step 4 is kept


@pytest.fixture(autouse=True)
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of the recorded runs, with their data beside them, as the working directory."""
    shutil.copytree(DATA / "recorded", tmp_path / "runs")
    with tarfile.open(DATA / "checkpoints.tar.xz") as files:
        files.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)


def losses(name: str) -> list[float]:
    rows = [json.loads(line) for line in Path("runs", name, "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", RUNS)
def test_a_recorded_run_resumes(name: str) -> None:
    """Steps 5 and 6 are trained again, on two devices: with the recorded losses, to rounding."""
    before = losses(name)
    cfg = load_config(f"runs/{name}/config.yaml", ["mesh.fsdp=2"])
    result = run(cfg, jax.devices()[:2])
    assert result.step == 6
    assert losses(name) == pytest.approx(before, rel=1e-4)
    assert len(before) == 6


@pytest.mark.parametrize("name", RUNS)
def test_the_model_of_a_recorded_run_opens(name: str) -> None:
    with Checkpoints(f"runs/{name}/checkpoints", read_only=True) as checkpoints:
        _, config = checkpoints.read(4)
    assert load_config(config).model == load_config(f"runs/{name}/config.yaml").model
    built, params = open_run(f"runs/{name}", ["mesh.fsdp=4", "mesh.tensor=2"])
    assert len(jax.tree.leaves(params)) == len(jax.tree.leaves(built.spec.state.params))
