"""The programs that people run and copy."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml

import jaxmem
from jaxmem.data.text import stdlib_files
from jaxmem.inference.export import export_model
from scripts import finetune, own_model, plan, train
from tests.support.conversations import write_conversations, write_tokenizer

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


def test_train_has_the_losses_of_the_command_and_resumes(config: Path, tmp_path: Path) -> None:
    jaxmem.train(config)
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert len(losses) == 4
    assert train.train(str(config), ["name=script"]) == losses
    assert len(train.train(str(config), ["name=script", "train.steps=6"])) == 2, "steps 5 and 6"


def test_a_model_of_a_script_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_model, "EMBED", 16)
    monkeypatch.setattr(own_model, "LAYERS", 2)
    assert np.isfinite(own_model.main([f"output={tmp_path}", "train.steps=2", "mesh.fsdp=8"]))


def test_plans_are_rows(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan.main(str(config), ["cpu:8"])
    head, row = capsys.readouterr().out.splitlines()
    assert head.split()[:2] == ["target", "parameters"]
    assert row.split()[0] == "cpu:8"
    assert row.endswith("fits")


@pytest.mark.exhaustive
def test_a_model_is_fine_tuned_exported_and_answers(config: Path, tmp_path: Path) -> None:
    write_tokenizer(stdlib_files()[:50], tmp_path / "tokenizer")
    chats = tmp_path / "chats.jsonl"
    write_conversations({f"What is {n}?": f"A number, {n}." for n in range(40)}, chats)
    jaxmem.train(jaxmem.load_config(config, [f"data.tokenizer={tmp_path}/tokenizer", "model.vocab=512"]))
    export_model(tmp_path / "run", tmp_path / "base")
    overrides = [f"output={tmp_path}", "train.steps=2", "train.evaluate_every=2", "data.sequence_length=64"]
    directory = finetune.finetune(str(tmp_path / "base"), str(chats), overrides)
    assert (finetune.export(directory) / "adapter_model.safetensors").is_file()
    assert isinstance(finetune.answer(directory, "What is 3?"), str)
