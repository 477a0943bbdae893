"""A run is opened with the tokenizer that it was trained with, and on any number of devices."""

import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from jaxmem import hf, inference, models
from jaxmem.checkpoint.manager import Checkpoints
from jaxmem.checkpoint.metrics import parse_row
from jaxmem.checkpoint.same_run import refuse_changes
from jaxmem.checkpoint.saved_state import SavedState
from jaxmem.cli.start import load
from jaxmem.config import Decoder, load_config, save_config
from jaxmem.config.hub import is_tokenizer_of
from jaxmem.data.chat_template import template_for
from jaxmem.data.tokenizer import tokenizer_for
from jaxmem.errors import UserError
from jaxmem.inference import load as load_module
from jaxmem.inference.evaluate import Evaluator, _settings_of, evaluate
from jaxmem.inference.export import export_model
from jaxmem.inference.generate import Generator
from jaxmem.inference.load import initial_state, model_config, open_model
from jaxmem.step import kernel_check
from jaxmem.step.programs import Program, program

MODEL = {"vocab": 264, "layers": 4, "embed": 16, "mlp": 16, "heads": 2, "kv_heads": 1, "head_dim": 8}
REVERSED = {"<|endoftext|>": 263}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A Hugging Face directory with a tokenizer of bytes, and with generation settings."""
    hf.save(models.build(Decoder(**MODEL), nnx.Rngs(0)), tmp_path / "base", tokenizer="bytes")
    (tmp_path / "base/generation_config.json").write_text('{"eos_token_id": [256, 7]}')
    return tmp_path / "base"


@pytest.fixture
def other(base: Path, tmp_path: Path) -> Path:
    """Another tokenizer with the same tokens: the ids of bytes in reverse, 263 and 9 as ends."""
    shutil.copytree(base, tmp_path / "other", ignore=lambda *_: ["config.json", "generation_config.json"])
    content = json.loads((tmp_path / "other/tokenizer.json").read_text())
    vocab = {token: 255 - number for token, number in content["model"]["vocab"].items()} | REVERSED
    content["model"]["vocab"] = vocab
    content["added_tokens"][0]["id"] = 263
    (tmp_path / "other/tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "other/generation_config.json").write_text('{"eos_token_id": [9, 263]}')
    return tmp_path / "other"


def test_several_processes_do_not_use_the_devices_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others would fail to read a checkpoint into them, and take it for a damaged one."""
    cfg = load_config(settings(mesh={"fsdp": 4}))
    assert load_module._program(cfg, computes=False).layout.mesh.size == 1
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(UserError, match="8 devices"):
        load_module._program(cfg, computes=False)


def settings(**sections: Any) -> dict[str, Any]:
    return {"name": "run", "model": MODEL, "batch": {"global_size": 4}, "train": {"steps": 1}, **sections}


def save_run(directory: Path, built: Program) -> None:
    """A run with a checkpoint of the initial weights."""
    params = SavedState(built).to_save(initial_state(built)).params
    save_config(built.cfg, directory / "config.yaml")
    with Checkpoints(directory / "checkpoints") as checkpoints:
        checkpoints.save(0, {"params": params}, {}, built.cfg.model_dump(mode="json"), force=True)


def test_a_run_has_its_own_tokenizer_and_not_that_of_its_base(base: Path, other: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    for tokenizer, expected in ((base, run / "hf"), (f"{base}/", run / "hf"), (other, other), ("bytes", "bytes")):
        cfg = load_config(settings(model={"hf": str(base)}, data={"tokenizer": str(tokenizer)}))
        save_config(cfg, run / "config.yaml")
        hf.copy_metadata(base, run / "hf")
        assert model_config(run).data.tokenizer == str(expected)
        assert model_config(run, [f"data.tokenizer={other}"]).data.tokenizer == str(other)


def test_a_run_keeps_its_model_and_tokenizer_if_the_directory_of_the_model_moves(base: Path, tmp_path: Path) -> None:
    rope = {"theta": 1000.0, "scaling": "yarn", "factor": 4.0}  # settings that the directory does not have
    run = tmp_path / "run"
    for tokenizer in (base, base / "tokenizer.json"):
        raw = settings(model={"hf": str(base), "rope": rope}, data={"tokenizer": str(tokenizer)})
        saved = load_config(raw)
        save_config(saved, run / "config.yaml")
        new = shutil.copytree(base, tmp_path / f"new-{tokenizer.name}")
        moved = [f"model.hf={new}"]
        opened = model_config(run, moved)
        resumed = load(run, moved, 8)
        for cfg in (opened, resumed):
            assert cfg.model == saved.model.model_copy(update={"hf": str(new)})
            assert cfg.data.tokenizer == str(new)
            refuse_changes(saved.model_dump(mode="json"), cfg.model_dump(mode="json"), run)
        assert model_config(run, ["model.preset=tiny"]).model == load_config(settings(model={"preset": "tiny"})).model
        replaced = load_config(run / "config.yaml", moved)
        assert replaced.model.rope.scaling == "none", "in another config than that of the run, it is another model"


@pytest.fixture
def adapter(base: Path, other: Path, tmp_path: Path) -> Path:
    """Adapters in float32 of a base in bfloat16, with another tokenizer, as TRL and axolotl save them."""
    hf.save(models.build(Decoder(**MODEL), nnx.Rngs(0)), tmp_path / "half", tokenizer="bytes", dtype="bfloat16")
    built, params = open_model(tmp_path / "half", ["adapter.kind=lora", "precision.parameters=float32"])
    hf.save_adapter(params, built.cfg.adapter, tmp_path / "adapter", base=str(tmp_path / "half"))
    shutil.copy(other / "tokenizer.json", tmp_path / "adapter")
    settings = {"eos_token": "<|endoftext|>", "chat_template": "{{ 'of the adapter' }}"}
    (tmp_path / "adapter/tokenizer_config.json").write_text(json.dumps(settings))
    return tmp_path / "adapter"


def test_an_adapter_has_the_template_in_its_directory(adapter: Path, tmp_path: Path) -> None:
    """Its tokenizer may have tokens that the model lacks."""
    data = model_config(adapter).data
    assert data.tokenizer == str(tmp_path / "half")
    assert template_for(tokenizer_for(data.tokenizer), data.chat_template).source == "{{ 'of the adapter' }}"
    export_model(adapter, tmp_path / "merged", merge=True)
    assert (tmp_path / "merged/chat_template.jinja").read_text() == "{{ 'of the adapter' }}"


def test_adapters_of_a_base_in_bfloat16_are_not_rounded(adapter: Path, tmp_path: Path) -> None:
    export_model(adapter, tmp_path / "again", adapter=True)
    before, after = (load_file(place / "adapter_model.safetensors") for place in (adapter, tmp_path / "again"))
    jax.tree.map(np.testing.assert_array_equal, after, before)
    layer = open_model(adapter)[1]["blocks"]["attention"]["q"]
    assert (layer["weight"].dtype, layer["lora"]["a"].dtype) == (jnp.bfloat16, jnp.float32)
    one_format = model_config(adapter, ["optimizer.trainable=['blocks[1:2].attention_norm.*']"])
    assert (one_format.precision.parameters, one_format.adapter.base) == ("bfloat16", None)


def test_an_adapter_of_a_base_with_other_settings_is_only_merged(adapter: Path, tmp_path: Path) -> None:
    """PEFT reads the settings of the base from its directory."""
    other = "model.rope={theta: 500000.0, scaling: linear, factor: 4.0}"
    message = r"model.rope.theta=500000 does not support --adapter, because PEFT reads 10000 from .*half.*use --merge"
    with pytest.raises(UserError, match=message):
        export_model(adapter, tmp_path / "out", adapter=True, overrides=[other])
    message = r"model.rope.scaling=linear does not .* PEFT reads none from"
    with pytest.raises(UserError, match=message):
        export_model(adapter, tmp_path / "out", adapter=True, overrides=["model.rope={scaling: linear, factor: 4.0}"])
    export_model(adapter, tmp_path / "out", merge=True, overrides=[other])
    assert json.loads((tmp_path / "out/config.json").read_text())["rope_theta"] == 500000.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope": {"theta": 500000.0}}, r"model.rope.theta=500000, but .*checkpoints.0 was trained with 10000; use"),
        ({"window": 8}, "model.window=8, but .* was trained with null"),
        ({"norm_epsilon": 1e-6}, "model.norm_epsilon=1e-06, but .* was trained with 1e-05"),
        ({"dropout": 0.1}, None),
    ],
)
def test_a_base_run_of_the_same_shapes_must_be_the_same_model(
    changes: dict[str, Any], message: str | None, tmp_path: Path
) -> None:
    save_run(tmp_path / "base", program(load_config(settings()), jax.devices()[:1]))
    adapter = {"kind": "lora", "rank": 2, "base_run": str(tmp_path / "base")}
    built = program(load_config(settings(model={**MODEL, **changes}, adapter=adapter)), jax.devices()[:1])
    if message is None:
        assert initial_state(built).params["blocks"]["mlp"]["up"]["lora"]["a"].shape == (4, 16, 2)
        return
    with pytest.raises(UserError, match=message):
        initial_state(built)


def test_a_tokenizer_ends_an_answer_with_its_eos_token(other: Path) -> None:
    content = json.loads((other / "tokenizer.json").read_text())
    content["added_tokens"].append({**content["added_tokens"][0], "id": 262, "content": "<|eot|>"})
    (other / "tokenizer.json").write_text(json.dumps(content))
    (other / "tokenizer_config.json").write_text('{"eos_token": {"content": "<|eot|>"}}')
    (other / "generation_config.json").unlink()
    tokenizer = tokenizer_for(str(other))
    assert (tokenizer.end, tokenizer.ends) == (263, {263, tokenizer.special["<|eot|>"]})


def test_a_tokenizer_is_that_of_the_base_in_any_spelling(
    base: Path, other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for spelled in ("base", "./base/", "base/tokenizer.json", base, base / "tokenizer.json"):
        assert is_tokenizer_of(str(spelled), base)
        assert is_tokenizer_of(str(spelled), "base")
    assert not is_tokenizer_of("other/tokenizer.json", base)
    assert not is_tokenizer_of("bytes", base)
    monkeypatch.setattr("jaxmem.config.load.local_directory", lambda *_: str(base))
    for name in ("org/name", "model.gguf"):
        cfg = load_config(settings(model={"hf": name}, data={"tokenizer": name}))
        assert cfg.data.tokenizer == cfg.model.hf == str(base)
    hf.save(models.build(Decoder(**MODEL), nnx.Rngs(0)), tmp_path / "out", base="base", tokenizer=f"{base}/")
    assert (tmp_path / "out/generation_config.json").exists(), "the settings of the base are kept"


def test_an_export_has_the_tokenizer_of_the_run(base: Path, other: Path, tmp_path: Path) -> None:
    cfg = load_config(settings(model={"hf": str(base)}, data={"tokenizer": str(other)}))
    save_run(tmp_path / "run", program(cfg, jax.devices()[:1]))
    hf.copy_metadata(base, tmp_path / "run/hf")
    export_model(tmp_path / "run", tmp_path / "out")
    assert (tmp_path / "out/tokenizer.json").read_text() == (other / "tokenizer.json").read_text()
    exported = json.loads((tmp_path / "out/config.json").read_text())
    assert (exported["bos_token_id"], exported["eos_token_id"], exported["pad_token_id"]) == (None, [263, 9], None)
    assert not (tmp_path / "out/generation_config.json").exists()  # its ids are those of the base's tokenizer


def test_a_run_of_pipeline_stages_is_opened_on_another_number_of_devices(tmp_path: Path) -> None:
    memory = {"update": "during", "remat": "full"}
    raw = settings(batch={"global_size": 4, "accumulate": 2}, mesh={"stage": 2}, pipeline={"rounds": 2}, memory=memory)
    save_run(tmp_path / "run", program(load_config(raw), jax.devices()[:2]))
    built, params = open_model(tmp_path / "run")
    assert built.layout.mesh.size == 1
    expected = program(load_config(settings()), jax.devices()[:1]).initialise().params
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    next(Generator(built, params)([np.arange(5, dtype=np.int32)], 1))


def test_other_data_do_not_have_the_settings_of_the_data_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    data = {"source": "chat", "path": "chats.jsonl", "chat_template": str(tmp_path / "chat.jinja")}
    raw = settings(data={**data, "on_overlong": "drop", "on_invalid": "skip"})
    save_config(load_config(raw), tmp_path / "run/config.yaml")
    for name, on_overlong in (("a 🚀.txt", "cut"), ("chats.jsonl", "drop")):
        (file := tmp_path / name).write_text('{"messages": []}')
        here = model_config(tmp_path / "run", _settings_of(str(file))).data
        assert (here.path, here.on_overlong) == (str(file), on_overlong)


@pytest.mark.exhaustive
def test_an_evaluation_names_the_records_that_it_skips(base: Path, tmp_path: Path, capsys: Any) -> None:
    (file := tmp_path / "texts.jsonl").write_text('{"text": "some words"}\n{\n')
    evaluate(base, str(file), ["data.on_invalid=skip", "data.sequence_length=16"])
    assert capsys.readouterr().err == "of 2 documents read: 1 invalid ones skipped\n"


def test_the_sums_of_an_evaluation_are_not_rounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum in float32 would stay at 2^30."""
    (tmp_path / "a.txt").write_text("x" * 160)
    data = {"source": "text", "path": str(tmp_path / "a.txt"), "sequence_length": 4}
    built = program(load_config(settings(data=data)), jax.devices()[:1])
    losses = [2.0**30, *[32.0] * 8, -(2.0**30)]
    batches = iter(losses)
    sums = lambda *_: {"loss": np.float32(next(batches)), "count": np.float32(1)}  # noqa: E731
    monkeypatch.setattr(Program, "compiled_evaluate", sums)
    with Evaluator(built, split="all") as evaluator:
        assert evaluator(None, len(losses))["loss"] == pytest.approx(8 * 32 / len(losses))
        batches = iter([1e30])
        row = {"step": 1, **evaluator(None, 1)}
    assert parse_row(json.dumps(row)) == row  # also with the largest perplexity


def test_inference_does_not_use_a_kernel_that_fails_its_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An export, which computes nothing, checks nothing."""
    cfg = load_config(settings())
    built = program(cfg, jax.devices()[:1])
    failure = {"memory.attention": "reference"}, ["warning: memory.attention=triton failed its check"]
    monkeypatch.setattr(kernel_check, "checked_kernels", lambda *_: failure)
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(platform="gpu")])
    for module in (inference.load, kernel_check):
        monkeypatch.setattr(module, "program", lambda cfg, _: dataclasses.replace(built, cfg=cfg))
    assert inference.load._program(cfg, computes=True).cfg.memory.attention == "reference"
    assert capsys.readouterr().err == "warning: memory.attention=triton failed its check\n"
    assert inference.load._program(cfg, computes=False).cfg.memory.attention == "auto"
