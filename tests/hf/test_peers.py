"""The same logits, and the same tokens, as transformers, for every family and what each may ask for."""

import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxmem import hf
from jaxmem.errors import UserError
from jaxmem.inference.generate import generate
from jaxmem.inference.load import open_model

HERE = Path(__file__).parent
PEERS = np.load(HERE / "data" / "transformers.npz")
CASES = sorted({name.rpartition(".")[0] for name in PEERS.files})


def test_every_case_is_recorded(compare):
    assert sorted(compare.CASES) == CASES


@pytest.mark.parametrize("name", CASES)
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


@pytest.mark.parametrize("name", ["llama3.2", "mistral", "gemma2-types", "gemma3", "olmo2", "mixtral", "qwen3-moe"])
def test_greedy_generation_is_that_of_transformers(name, directories, compare):
    program, params = open_model(directories / name)
    assert list(generate(program, params, compare.ROWS[0], compare.NEW)) == PEERS[f"{name}.greedy"].tolist()


def test_a_missing_expert_is_named(tmp_path, directories):
    shutil.copytree(directories / "qwen3-moe", tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    save_file({key: x for key, x in tensors.items() if key != name}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=name):
        hf.load(tmp_path)
