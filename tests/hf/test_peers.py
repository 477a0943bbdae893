"""The same logits, and the same tokens, as transformers, for every family and what each may ask for."""

import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jaxmem import hf
from jaxmem.errors import UserError
from jaxmem.inference.load import open_model
from tests.support.generation import generate
from tests.support.tiers import cases

HERE = Path(__file__).parent
PEERS = np.load(HERE / "data" / "transformers.npz")
CASES = sorted({name.rpartition(".")[0] for name in PEERS.files})


def test_every_case_is_recorded(compare):
    assert sorted(compare.CASES) == CASES


FAST = (
    "gemma2", "gemma3", "gpt-oss", "llama3.1", "olmo2", "phi4-mini", "qwen2.5-yarn",
)  # fmt: skip


@pytest.mark.parametrize("name", cases(CASES, *FAST))
def test_logits_are_those_of_transformers(name, directories, compare):
    """A row as it is, one with padding in front, and one of two documents."""
    model = hf.load(directories / name)
    places = np.arange(compare.LENGTH)
    segments = np.stack([places >= 0, places >= compare.PADDED, 1 + (places >= compare.CUT)]).astype(np.int32)
    starts = np.array([0, compare.PADDED, compare.CUT])[:, None]
    positions = np.where(places >= starts, places - starts, places * (segments > 0)).astype(np.int32)
    given = [jnp.asarray(x, jnp.int32) for x in (compare.ROWS, positions, segments)]
    found = jax.jit(model)(*given)
    shown = (segments > 0)[..., None]
    np.testing.assert_allclose(np.asarray(found) * shown, PEERS[f"{name}.logits"], atol=1e-4)


GENERATING = ("llama3.2", "mistral", "gemma3", "gpt-oss", "deepseek-v2", "phi4-mini-short")  # their KV caches differ


@pytest.mark.parametrize("name", cases(GENERATING, "llama3.2"))
def test_greedy_generation_is_that_of_transformers(name, directories, compare):
    program, params = open_model(directories / name)
    assert list(generate(program, params, compare.ROWS[0], compare.NEW)) == PEERS[f"{name}.greedy"].tolist()


@pytest.mark.exhaustive
def test_experts_in_mxfp4_are_read_as_they_are(tmp_path, directories):
    place = directories / "gpt-oss-mxfp4"
    file, stem = load_file(place / "model.safetensors"), "model.layers.1.mlp.experts."
    _, params = open_model(place, ["adapter.kind=qlora", "adapter.base=mxfp4"])
    for name, own in (("gate", slice(0, None, 2)), ("up", slice(1, None, 2)), ("down", slice(None))):
        stored = params["blocks"]["mlp"][name]["weight"]
        tensor = f"{stem}{'down' if name == 'down' else 'gate_up'}_proj"
        blocks, scales = file[f"{tensor}_blocks"][:, own], file[f"{tensor}_scales"][:, own]
        swapped = (blocks >> 4 | blocks << 4).reshape(*blocks.shape[:2], -1)
        np.testing.assert_array_equal(stored.codes[1], swapped.swapaxes(1, 2))
        np.testing.assert_array_equal(stored.scale[1], scales.swapaxes(1, 2))
    # Without quantization, written in bfloat16: the exact values.
    hf.save(hf.load(place), tmp_path / "out", base=place, dtype="bfloat16")
    found = load_file(tmp_path / "out" / "model.safetensors")[f"{stem}down_proj"]
    blocks, scales = file[f"{stem}down_proj_blocks"], file[f"{stem}down_proj_scales"]
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*scales.shape, 32)
    values = np.where(codes & 8, -1, 1) * table[codes & 7] * 2.0 ** (scales[..., None].astype(int) - 127)
    np.testing.assert_array_equal(found.astype(np.float64), values.reshape(*scales.shape[:2], -1).swapaxes(1, 2))
    assert "quantization_config" not in (tmp_path / "out" / "config.json").read_text()


@pytest.mark.exhaustive
@pytest.mark.parametrize("targets", ["blocks.attention.*", "blocks.*"])
def test_frozen_experts_in_mxfp4_are_written_as_they_are(tmp_path, directories, targets):
    place = directories / "gpt-oss-mxfp4"
    settings = ["adapter.kind=qlora", "adapter.experts=mxfp4", f"adapter.targets={{{targets}: 2}}"]
    program, params = open_model(place, settings)
    hf.save(nnx.merge(program.model.graphdef, params), tmp_path / "out", base=place)
    before, after = (load_file(one / "model.safetensors") for one in (place, tmp_path / "out"))
    codes = [name for name in before if name.endswith(("_blocks", "_scales"))]
    config = (tmp_path / "out" / "config.json").read_text()
    if targets == "blocks.*":  # adapters are merged into the experts
        assert not set(codes) & set(after)
        assert "quantization_config" not in config
    else:
        jax.tree.map(np.testing.assert_array_equal, *({name: x[name] for name in codes} for x in (before, after)))
        assert "quantization_config" in config
        assert before.keys() == after.keys()


def test_a_missing_expert_is_named(tmp_path, directories):
    shutil.copytree(directories / "qwen3-moe", tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    save_file({key: x for key, x in tensors.items() if key != name}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=name):
        hf.load(tmp_path)
