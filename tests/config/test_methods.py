"""Methods of training, and the config of a run that is only planned."""

import json
from pathlib import Path

import optax
import pytest
import yaml

from jaxmem.config import load_config, save_config, save_settings
from jaxmem.config.hugging_face import config_json
from jaxmem.config.methods import METHODS, config_with, is_model, run_config
from jaxmem.config.networks import Decoder
from jaxmem.errors import UserError

TINY = {"name": "own", "model": {"preset": "tiny"}, "optimizer": {"learning_rate": 0.5, "beta1": 0.8}}


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    """A directory with a config.json, and nothing else."""
    shape = {"vocab": 512, "layers": 2, "embed": 64, "mlp": 128, "heads": 4, "kv_heads": 2, "head_dim": 16}
    place = tmp_path / "My model"
    place.mkdir()
    (place / "config.json").write_text(json.dumps(config_json(Decoder.model_validate(shape))))
    return place


@pytest.mark.parametrize("method", METHODS)
def test_every_method_makes_a_config_that_can_be_trained(method: str, hf: Path, tmp_path: Path) -> None:
    for source in ("tiny", str(hf), TINY, load_config({**TINY, "train": {"steps": 3}})):
        cfg = run_config(source, method=method, devices=2)
        for save in (save_config, save_settings):
            save(cfg, tmp_path / "run.yaml")
            assert load_config(tmp_path / "run.yaml") == cfg
        assert bool(cfg.trainable_patterns) == ("lora" in method)
    for previous in METHODS:
        assert run_config(run_config("tiny", method=previous), method=method).steps


def test_settings_are_saved_without_defaults(hf: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    for path in sorted((Path(__file__).parents[2] / "configs").glob("*.yaml")):
        cfg = load_config(path)
        save_settings(cfg, file)
        assert load_config(file) == cfg, path
    save_settings(run_config(hf, method="qlora"), file)
    saved = yaml.safe_load(file.read_text())
    assert saved["model"] == {"hf": str(hf)}
    assert saved["data"]["source"] == "chat", "a fine-tuned model is not trained on source code"
    assert set(saved) == {"name", "model", "data", "batch", "mesh", "memory", "optimizer", "adapter", "train"}
    of_bytes = run_config(hf, ["data.tokenizer=bytes", "data.source=stdlib", "data.path=null"])
    save_settings(of_bytes, file)
    assert load_config(file) == of_bytes  # not the tokenizer of the directory


def test_rows_are_at_most_as_long_as_the_model_was_trained_on(hf: Path) -> None:
    settings = json.loads((hf / "config.json").read_text())
    (hf / "config.json").write_text(json.dumps(settings | {"max_position_embeddings": 256}))
    assert run_config(hf).data.sequence_length == 256


def test_a_model_is_a_preset_or_a_directory(hf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_model("llama3-8b")
    assert is_model(hf)
    assert not is_model("configs/demo.yaml")
    cfg = run_config(hf, sequence_length=128, devices=4)
    assert (cfg.name, cfg.data.sequence_length, cfg.batch.global_size) == ("My-model", 128, 4)
    assert isinstance(cfg.model, Decoder)
    assert (cfg.model.hf, cfg.data.tokenizer, cfg.model.embed) == (str(hf), str(hf), 64)
    monkeypatch.chdir(hf.parent)
    Path("tiny").write_text("name: a file of that name\n")
    assert not is_model("tiny")
    with pytest.raises(UserError, match=r"llama3-8 is neither .*did you mean llama3-8b"):
        run_config("llama3-8")


def test_a_plan_needs_no_length_of_training() -> None:
    assert run_config(TINY).train.steps
    warm = run_config({**TINY, "optimizer": {"warmup": 5000}})
    assert warm.steps > warm.optimizer.warmup
    assert run_config(TINY, ["train.tokens=1000"]).train.steps is None
    with pytest.raises(UserError, match="train"):
        load_config(TINY)


def test_a_method_keeps_what_it_does_not_change() -> None:
    cfg = run_config({**TINY, "precision": {"compute": "float32"}}, ["batch.global_size=6"], method="full-8bit")
    assert (cfg.optimizer.name, cfg.optimizer.learning_rate, cfg.optimizer.beta1) == ("adamw8bit", 0.5, 0.9)
    assert (cfg.precision.compute, cfg.precision.parameters, cfg.batch.global_size) == ("float32", "bfloat16", 6)
    ranked = {**TINY, "adapter": {"kind": "qlora", "rank": 4, "base": "int4", "embeddings": "bfloat16"}}
    lora = run_config(ranked, method="lora").adapter
    assert (lora.kind, lora.rank, lora.base, lora.embeddings) == ("lora", 4, "bfloat16", None)
    assert run_config(ranked, method="full").adapter.kind == "none"
    with pytest.raises(UserError, match="did you mean qlora"):
        run_config(TINY, method="qlor")


def test_a_preset_is_found_by_its_spelling_on_the_hub() -> None:
    assert run_config("Llama-3.1-8B-Instruct").model.preset == "llama3.1-8b"
    assert run_config({"name": "x", "model": {"preset": "Qwen3-8B"}}).model.preset == "qwen3-8b"


@pytest.mark.parametrize("name", ["qwen3-vl-8b", "Qwen3-VL-8B-Instruct"])
def test_a_known_model_without_support_is_called_not_supported(name: str) -> None:
    with pytest.raises(UserError, match=rf"^{name}: the architecture of qwen3-vl is not supported.*qwen3-8b$"):
        run_config(name)


def test_an_optimizer_of_a_script_refuses_only_settings_that_differ(hf: Path, tmp_path: Path) -> None:
    """A loaded config has all keys of the section."""
    raw = {"name": "x", "model": {"preset": "tiny"}, "optimizer": {"trainable": ["head.*"]}, "train": {"steps": 3}}
    save_config(load_config(raw), tmp_path / "saved.yaml")
    for source in (raw, load_config(raw), tmp_path / "saved.yaml"):
        cfg = config_with(source, optimizer=optax.sgd(1.0))
        assert (cfg.optimizer.trainable, cfg.optimizer.clip) == (("head.*",), None)
        assert config_with(cfg, optimizer=optax.sgd(1.0)).optimizer == cfg.optimizer
    fine_tuned = load_config({**raw, "model": {"hf": str(hf)}})
    assert config_with(fine_tuned, optimizer=optax.sgd(1.0)).optimizer.clip is None
    with pytest.raises(UserError, match=r"optimizer\.weight_decay has no effect with the argument optimizer"):
        config_with(load_config(raw, ["optimizer.weight_decay=0.2"]), optimizer=optax.sgd(1.0))


def test_settings_that_batches_of_a_script_cannot_follow_are_refused() -> None:
    raw = {"name": "x", "model": {"preset": "tiny"}, "train": {"steps": 3, "evaluate_every": 2}}
    batches = [{"inputs": [[1, 2]]}]
    assert config_with(raw, data=batches, held_out=batches).user.held_out is not None
    with pytest.raises(UserError, match=r"^held_out must be an iterable that can be read again, such as a list$"):
        config_with(raw, data=batches, held_out=iter(batches))
    with pytest.raises(UserError, match=r"data\.epochs=1 has no effect with the argument data; use train.steps"):
        config_with({**raw, "data": {"epochs": 1}}, data=batches, held_out=batches)
