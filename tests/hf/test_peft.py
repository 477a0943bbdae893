"""Adapters of PEFT: the same logits and the same learning; out again, merged, and in checkpoints without their base."""

import json
import shutil
from functools import partial
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.traverse_util import flatten_dict
from safetensors.numpy import load_file, save_file

from jaxmem import hf
from jaxmem.checkpoint.saved_state import SavedState
from jaxmem.config import Decoder, load_config
from jaxmem.config.adapter import Adapter
from jaxmem.config.peft import adapter_fields, base_of
from jaxmem.errors import UserError
from jaxmem.hf.peft import check_adapter
from jaxmem.inference.load import initial_state, open_model
from jaxmem.step.programs import program
from tests.hf.hub_server import COMMIT

HERE = Path(__file__).parent
PEERS = np.load(HERE / "data" / "peft.npz")
CASES = [name.removesuffix(".logits") for name in PEERS.files if name.endswith(".logits")]


@pytest.fixture(scope="module")
def peft() -> ModuleType:
    """The adapters whose outputs PEFT has computed."""
    from tests.hf import peft_reference

    return peft_reference


@pytest.fixture(scope="module")
def place(peft: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bases, and their adapters."""
    place = tmp_path_factory.mktemp("peft")
    for base in {peft.BASE, *peft.BASES.values()}:
        peft.write_directory(base, place / base)
    for case in peft.CASES:
        peft.write_adapter(case, place / case)
    return place


def beside(place: Path, case: str, **sections):
    base = {"name": "x", "model": {"hf": str(place / "llama3")}, "train": {"steps": 8}, "data": {"tokenizer": "bytes"}}
    return load_config({**base, "adapter": {"hf": str(place / case)}, **sections})


@partial(jax.jit, static_argnums=0)
def logits_of(graphdef, params, rows):
    return nnx.merge(graphdef, params)(jnp.asarray(rows, jnp.int32))


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_peft_merged_too(case, place, peft, tmp_path):
    """Also where frozen weights were read to host memory."""
    base, offload = place / peft.base_of(case), "frozen" if case == "dora" else "none"
    built, params = open_model(base, [f"adapter.hf={place / case}", f"memory.offload={offload}"])
    away = [x.sharding.memory_kind == "pinned_host" for x in jax.tree.leaves(params)]
    assert sum(away) == (2 + 7 if offload == "frozen" else 0)  # embedding, head, and a layer's matrices
    graphdef, expected = built.model.graphdef, PEERS[f"{case}.logits"]
    np.testing.assert_allclose(logits_of(graphdef, params, peft.ROWS), expected, atol=1e-4)

    out, saved = tmp_path / "out", hf.saved_names(built)
    hf.save_adapter(params, built.cfg.adapter, out, base=str(base), saved=saved)
    given, found = (load_file(one / "adapter_model.safetensors") for one in (place / case, out))
    assert given.keys() == found.keys()
    for name, x in given.items():
        np.testing.assert_array_equal(found[name], x)
    again = open_model(out)[0].cfg  # the base by its name
    assert again.adapter.model_copy(update={"hf": built.cfg.adapter.hf}) == built.cfg.adapter
    assert again.trainable_patterns == built.cfg.trainable_patterns

    hf.save(nnx.merge(graphdef, params), tmp_path / "merged", base=base)
    graphdef, state = nnx.split(hf.load(tmp_path / "merged"))
    np.testing.assert_allclose(logits_of(graphdef, nnx.to_pure_dict(state), peft.ROWS), expected, atol=1e-4)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", [name.removesuffix(".losses") for name in PEERS.files if name.endswith(".losses")])
def test_losses_are_those_of_peft_and_checkpoints_hold_no_base(case, place, peft):
    """The same rows, the same AdamW, from the same adapters."""
    rates = {"learning_rate": peft.LEARNING["lr"], "schedule": "constant", "clip": None, "beta2": 0.999}
    rows = peft.ROWS
    sections = {
        "optimizer": {**rates, "weight_decay": 0.0},
        "data": {"source": "tokens", "path": "none", "tokenizer": "bytes", "sequence_length": rows.shape[1] - 1},
        "batch": {"global_size": len(rows)},
    }
    built = program(beside(place, case, **sections), jax.devices()[:1])
    given = {
        "inputs": rows[None, :, :-1].astype(np.int32),
        "targets": rows[None, :, 1:].astype(np.int32),
        "mask": np.ones((1, len(rows), rows.shape[1] - 1), np.float32),
        "segment_ids": np.ones((1, len(rows), rows.shape[1] - 1), np.int32),
        "positions": np.broadcast_to(np.arange(rows.shape[1] - 1, dtype=np.int32), (1, len(rows), rows.shape[1] - 1)),
    }
    state, step, losses = initial_state(built), built.lower_step().compile(), []
    for _ in range(peft.STEPS):
        state, metrics = step(state, built.place(given))
        losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses, PEERS[f"{case}.losses"], rtol=1e-4)

    kept = flatten_dict(SavedState(built).to_save(state).params)
    whole = {("embedding", "weight"), ("head", "weight"), ("norm", "scale")} if case == "saved" else set()
    assert {path for path, x in kept.items() if x is not None} >= {path for path in kept if "lora" in path} | whole
    assert kept["blocks", "attention", "q", "weight"] is None
    again = SavedState(built).complete(SavedState(built).to_save(state), built.cfg.model_dump(mode="json"))
    jax.tree.map(np.testing.assert_array_equal, again.params, state.params)


@pytest.mark.parametrize(("layers", "target"), [(0, "blocks[0:1].attention.q"), ([], "blocks.attention.q")])
def test_a_number_selects_a_layer(layers, target, tmp_path):
    settings = {"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"], "layers_to_transform": layers}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    model = Decoder(vocab=9, layers=2, embed=8, mlp=8, heads=1, kv_heads=1, head_dim=8)
    assert adapter_fields(tmp_path, model)[0]["targets"] == {target: 2}


@pytest.mark.exhaustive
def test_what_does_not_fit(place, tmp_path, peft):
    def changed(**settings) -> Path:
        peft.write_adapter("lora", tmp_path)
        file = tmp_path / "adapter_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))
        return tmp_path

    for settings, message in (
        ({"target_modules": ["qproj"]}, r"target_modules: qproj is not supported; did you mean q_proj"),
        ({"target_modules": "all"}, r"target_modules selects no layer of the model"),
        ({"target_modules": ["input_layernorm"]}, "input_layernorm is not supported; expected one of down_proj"),
        ({"use_bdlora": True, "peft_type": "LOHA"}, 'peft_type="LOHA" is not supported; expected LORA or PROMPT_TUN'),
        ({"base_model_name_or_path": "meta/Llama"}, r"base_model_name_or_path=meta/Llama is neither a local path nor"),
        ({"base_model_name_or_path": "meta/Llama", "revision": "../x"}, r"revision=../x is not the name of a commit"),
        ({"base_model_name_or_path": "a\0b" + "c" * 9000}, r"is not a local directory"),
        ({"use_bdlora": {"nblocks": 2}}, r"use_bdlora=.* is not supported"),
        ({"kasa_config": {"beta": 0.1}}, r"kasa_config=.* is not supported"),
        ({"target_parameters": ["mlp.experts.down_proj"]}, "use an adapter of linear layers only"),
        ({"init_lora_weights": "pissa_niter_4"}, r'init_lora_weights="pissa_niter_4" changes the base model; save the'),
        ({"init_lora_weights": "loftq"}, r'init_lora_weights="loftq" is not supported; expected true or'),
        ({"trainable_token_indices": [1]}, r"trainable_token_indices=\[1\] is not supported"),
        ({"rank_pattern": {"qproj": 2}}, r"rank_pattern: qproj matches no target module"),
        ({"target_modules": r"([\w.]+)+!"}, r"target_modules: matching takes longer than"),
        ({"r": 8}, r"lora_A.weight has shape \[4, .*, but adapter_config.json requires \[8, "),
    ):
        found = changed(**settings)
        given = [found] if "base_model_name_or_path" in settings else [place / "llama3", [f"adapter.hf={found}"]]
        with pytest.raises(UserError, match=message):
            open_model(*given)
    peft.write_directory("llama2", tmp_path / "other")  # more key heads
    with pytest.raises(UserError, match=r"k_proj\.lora_B\.weight has shape \[16, 4\], but .* requires \[32, 4\]"):
        open_model(tmp_path / "other", [f"adapter.hf={place / 'lora'}"])


@pytest.mark.exhaustive
def test_a_base_of_the_same_shape_and_other_weights(place, tmp_path, peft):
    """Is refused before it is read: by an adapter of ours, which knows its base in any dtype, and by one that names a
    directory that is here."""
    peft.write_directory(peft.BASE, other := tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    shutil.copytree(other, half := tmp_path / "half")
    save_file({name: x.astype(np.float16) for name, x in weights.items()}, half / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][0, 5] *= -1
    save_file(weights, other / "model.safetensors")

    cfg = beside(place, "lora", data={"source": "tokens", "path": "none", "tokenizer": "bytes"})
    params = initial_state(program(cfg, jax.devices()[:1])).params
    hf.save_adapter(params, cfg.adapter, tmp_path / "ours", base=str(place / "llama3"))
    (tmp_path / "theirs").mkdir()
    peft.write_adapter("lora", tmp_path / "theirs")
    for adapter, named in (("ours", "somewhere/else"), ("theirs", str(place / "llama3"))):
        file = tmp_path / adapter / "adapter_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "base_model_name_or_path": named}))
        check_adapter(tmp_path / adapter, half)
        with pytest.raises(
            UserError, match=rf"adapter\.hf=.*{adapter} was trained on other weights than model\.hf=.*other"
        ):
            open_model(other, [f"adapter.hf={tmp_path / adapter}"])


def test_a_base_in_the_cache_has_its_name_on_the_hub(place, tmp_path, monkeypatch):
    """So that the adapter can be used on other machines."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    base = tmp_path / "models--org--name" / "snapshots" / COMMIT
    shutil.copytree(place / "llama3", base)
    params = {"prompt": {"weight": jnp.ones((2, 32))}}
    hf.save_adapter(params, Adapter(kind="prompt", virtual_tokens=2), tmp_path / "out", base=str(base))
    settings = json.loads((tmp_path / "out/adapter_config.json").read_text())
    assert (settings["base_model_name_or_path"], settings["revision"]) == ("org/name", COMMIT)
    assert base_of(tmp_path / "out") == base
