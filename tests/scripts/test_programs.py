"""The programs that people run and copy; tests/docs types scripts/finetune.py."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml

import jaxmem
from jaxmem.config import Cluster
from scripts import finetune, own_model, plan, train

TINY = {"preset": "tiny", "layers": 1, "embed": 32, "mlp": 64, "heads": 2, "kv_heads": 2, "head_dim": 16}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (texts := tmp_path / "texts").mkdir()
    for number in range(40):
        (texts / f"{number}.txt").write_text(f"text {number} says that {number} is {number}\n" * 20)
    settings = {
        "name": "run",
        "output": str(tmp_path),
        "model": TINY,
        "data": {"source": "text", "path": str(texts), "sequence_length": 32},
        "mesh": {"fsdp": -1},
        "batch": {"global_size": 8},
        "train": {"steps": 4, "log_every": 1},
        "checkpoint": {"every": 2},
    }
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(settings))
    return file


@pytest.mark.exhaustive
def test_train_has_the_losses_of_the_command_and_resumes(config: Path, tmp_path: Path) -> None:
    jaxmem.train(config)
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert len(losses) == 4
    assert train.train(str(config), ["name=script"]) == losses
    with pytest.raises(jaxmem.UserError, match=r"cannot resume from .*: seed was 0, is 1"):
        train.train(str(config), ["name=script", "train.steps=6", "seed=1"])
    assert len(train.train(str(config), ["name=script", "train.steps=6"])) == 2, "steps 5 and 6"


@pytest.mark.exhaustive
def test_train_saves_the_last_step_if_the_data_ends(config: Path, tmp_path: Path) -> None:
    overrides = ["data.epochs=1", "train.steps=1000", "checkpoint.every=1000"]
    steps = len(train.train(str(config), overrides))
    assert 0 < steps < 1000
    assert [int(path.name) for path in (tmp_path / "run/checkpoints").iterdir() if path.name.isdigit()] == [steps]


def test_fine_tuning_again_after_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A complete run has no losses; adapters that are written stay."""
    result = SimpleNamespace(metrics={}, held_out={}, directory=tmp_path, step=20, exit_code=0)
    monkeypatch.setattr(jaxmem, "train", lambda _: result, raising=False)
    monkeypatch.setattr(
        jaxmem, "load_config", lambda *_: jaxmem.Config.model_construct(cluster=Cluster()), raising=False
    )
    assert finetune.finetune("model", "chats.jsonl") is result
    (tmp_path / "adapter-20").mkdir()
    assert finetune.export(result) == tmp_path / "adapter-20"


@pytest.mark.exhaustive
def test_a_model_of_a_script_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_model, "EMBED", 16)
    monkeypatch.setattr(own_model, "LAYERS", 2)
    overrides = [f"output={tmp_path}", "train.steps=2", "mesh.fsdp=8", "memory.update=during"]
    first = own_model.main(overrides)
    assert np.isfinite(first.metrics["loss"])
    again = own_model.main(overrides)  # the run is complete
    assert (again.step, again.exit_code) == (2, 0)


@pytest.mark.exhaustive
def test_plans_are_rows(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan.main(str(config), ["cpu:8"])
    head, row = capsys.readouterr().out.splitlines()
    assert head.split()[:2] == ["target", "parameters"]
    assert row.split()[0] == "cpu:8"
    assert row.endswith("fits")
