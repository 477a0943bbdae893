"""The comparison of methods on a real model, with a tiny GGUF file and a few updates."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import scripts.bench
from jaxmem import Loader, load_config
from scripts.bench import quality_peers
from tests.hf.gguf_reference import write_file

SCRIPT = Path(__file__).parents[2] / "scripts/bench/quality.py"


@pytest.fixture
def quality(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "cache"))
    spec = importlib.util.spec_from_file_location("quality", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, value in {"RECORDS": tmp_path / "records", "WORK": tmp_path / "runs", "STEPS": 3}.items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(module, "PACKAGES", ("json", "concurrent", "optax"))
    monkeypatch.setattr(module, "HELD_OUT", ("json",))
    monkeypatch.setattr(module, "VALIDATION", ("concurrent",))
    write_file("llama", tmp_path / "model.gguf")
    return module


def test_each_method_is_a_valid_config(quality: ModuleType, tmp_path: Path) -> None:
    run = {"name": "x", "model": {"hf": str(tmp_path / "model.gguf")}, "train": {"steps": 1}}
    for method in quality.METHODS.values():
        assert load_config(run, method.overrides.split()).model.embed == 64


@pytest.mark.exhaustive
def test_the_best_learning_rate_is_trained_at_full_length(
    quality: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(quality, "SEARCH_STEPS", 2)
    monkeypatch.setattr(quality, "MAIN", {})  # a second seed
    monkeypatch.setitem(quality.METHODS, "qlora-16", quality.METHODS["qlora-16"]._replace(learning_rates=(1e-3, 1e-2)))
    train = quality.train

    def train_first(run: Any, *arguments: Any) -> None:
        """Of the search only the first rate: the record of the second has its numbers, and a larger loss."""
        if run.evaluated == "held-out" or run.learning_rate == 1e-3:
            train(run, *arguments)
            return
        first = json.loads((quality.RECORDS / "qlora-16-0.001-2-0.json").read_text())
        (quality.RECORDS / f"{run.name}.json").write_text(
            json.dumps(first | run._asdict() | {"loss": first["loss"] + 1})
        )

    monkeypatch.setattr(quality, "train", train_first)
    quality.train_all(["qlora-16"], tmp_path / "model.gguf")
    records = {file.stem: json.loads(file.read_text()) for file in (tmp_path / "records").iterdir()}
    assert records.keys() == {"qlora-16-0.001-2-0", "qlora-16-0.01-2-0", "qlora-16-0.001-3-0"}
    assert records["qlora-16-0.001-2-0"]["evaluated"] == "validation"
    assert records["qlora-16-0.001-3-0"]["evaluated"] == "held-out"
    assert records["qlora-16-0.001-3-0"]["state_bytes_per_parameter"]["optimizer"] > 0
    assert not list((tmp_path / "runs").glob("qlora*"))
    monkeypatch.setattr(quality, "train", pytest.fail)  # nothing is trained again
    quality.train_all(["qlora-16"], tmp_path / "model.gguf")
    compared = list(quality.rows(["qlora-16"]))
    quality.print_table(compared)
    assert "| qlora-16 | 0.001 |" in capsys.readouterr().out


def test_losses_are_compared_with_those_of_the_same_seed(
    quality: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quality.RECORDS.mkdir()
    losses = {"adamw": {0: 2.5, 1: 2.25}, "adamw8bit": {0: 2.625, 1: 2.5}, "muon": {0: 2.75}}
    for method, of_seeds in losses.items():
        best = quality.METHODS[method].learning_rates[-1]
        for rate in quality.METHODS[method].learning_rates:
            searched = quality.Run(method, rate, 0, quality.SEARCH_STEPS)
            (quality.RECORDS / f"{searched.name}.json").write_text(json.dumps({"loss": 3.0 - rate}))
        for seed, loss in of_seeds.items():
            run = quality.Run(method, best, seed, quality.STEPS)
            record = run._asdict() | {"loss": loss, "state_bytes_per_parameter": {"parameters": 4.0, "optimizer": 8.0}}
            (quality.RECORDS / f"{run.name}.json").write_text(json.dumps(record))
    compared = list(quality.rows(["adamw", "adamw8bit", "muon"]))
    quality.print_table(compared)
    printed = capsys.readouterr().out
    assert "| adamw | 0.0001 | 2.5000, 2.2500 |  | 12.00 |" in printed
    assert "| adamw8bit | 0.0001 | 2.6250, 2.5000 | +0.1250, +0.2500 | 12.00 |" in printed
    assert "| muon | 0.001 | 2.7500 | +0.2500 | 12.00 |" in printed
    quality.draw(compared, tmp_path / "quality.png")
    assert (tmp_path / "quality.png").stat().st_size > 1000


def test_a_figure_without_adamw_names_the_missing_runs(
    quality: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    quality.RECORDS.mkdir()
    (quality.RECORDS / "adamw-1e-05-25-0.json").write_text(json.dumps({"loss": 2.0}))
    monkeypatch.setattr(sys, "argv", ["quality.py", "table", "qlora-16", "--png", str(tmp_path / "quality.png")])
    with pytest.raises(SystemExit):
        quality.main()
    assert "missing: adamw-3e-05-25-0, adamw-0.0001-25-0" in capsys.readouterr().err
    assert not (tmp_path / "quality.png").exists()


def test_a_soft_prompt_is_not_compared(quality: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    quality.print_table([quality.Row("adamw", 1e-5, {0: 2.0}, {0: 0.0}, 16.0)])
    assert "not comparable" not in capsys.readouterr().out
    quality.print_table([quality.Row("prompt", 1e-3, {0: 2.0}, {}, 4.0)])
    assert "prompt: not comparable, the loss of the first 512 tokens of each document" in capsys.readouterr().out


def test_short_runs_are_compared_with_adamw_at_the_same_learning_rate(
    quality: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    quality.RECORDS.mkdir()
    for method, loss in {"adamw": 2.0, "fp8-row": 2.25}.items():
        (quality.RECORDS / f"{method}-1e-05-25-0.json").write_text(json.dumps({"loss": loss}))
    quality.print_search(["adamw", "fp8-row", "muon"])
    assert "| fp8-row | 1e-05 | 2.2500 | +0.2500 |" in capsys.readouterr().out


def test_parts_of_the_corpus_share_no_document(quality: ModuleType) -> None:
    digests = quality.write_corpus()
    parts = [set((quality.WORK / f"{name}.jsonl").read_text().splitlines()) for name in digests]
    assert all(parts)
    assert not parts[0] & parts[1] | parts[0] & parts[2] | parts[1] & parts[2]


def test_records_of_another_corpus_are_refused(quality: ModuleType) -> None:
    quality.RECORDS.mkdir()
    (quality.RECORDS / "adamw.json").write_text(json.dumps({"corpus": {"train": "0"}}))
    with pytest.raises(SystemExit, match="other versions"):
        quality.write_corpus()


@pytest.mark.exhaustive
def test_other_libraries_get_the_rows_of_the_runs(
    quality: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "scripts.bench.quality", quality)
    monkeypatch.setattr(scripts.bench, "quality", quality, raising=False)
    quality_peers.write_rows(tmp_path / "model.gguf", tmp_path / "peers", steps=2, seeds=(0,))
    updates = list(quality_peers.batches(tmp_path / "peers/rows-0.npz"))
    cfg = load_config(quality.settings(quality.Run("adamw", 1.0, 0, 2), tmp_path / "model.gguf"))
    with Loader(cfg) as loader:
        for rows in updates:
            assert np.array_equal(next(loader)["inputs"][0], rows["inputs"])
    assert len(updates) == 2
    held_out = list(quality_peers.batches(tmp_path / "peers/held-out.npz"))
    assert all(set(rows["mask"].ravel()) <= {0, 1} for rows in held_out)
    assert (tmp_path / "peers/model/model.safetensors").is_file()
    assert np.load(tmp_path / "peers/rates.npy").tolist() == pytest.approx([1.0, 0.1], abs=1e-6)
