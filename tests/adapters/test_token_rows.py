"""Trained rows of the embedding: which values change, on a mesh and with a quantized base, and merging."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.traverse_util import flatten_dict

from jaxmem import adapters
from jaxmem.errors import UserError
from tests.step.conftest import Trained, config
from tests.support.tiers import exhaustive

IDS = [101, 7, 32]
SECTIONS = {
    "adapter": {"kind": "lora", "rank": 2, "targets": ["*.q"], "token_indices": IDS},
    "data": {"sequence_length": 20},
    "optimizer": {"epsilon": 1e-3, "learning_rate": 1e-2},
}


@pytest.fixture(scope="module")
def alone():
    return Trained(config(**SECTIONS), updates=2)


def test_the_rows_are_trained_on_any_mesh_and_the_embedding_is_not(alone):
    before, after = flatten_dict(alone.first), flatten_dict(alone.params)
    np.testing.assert_array_equal(before["embedding", "lora", "trained"], before["embedding", "weight"][IDS])
    changed = {path for path in before if (before[path] != after[path]).any()}
    assert ("embedding", "lora", "trained") in changed
    assert all("lora" in path for path in changed)
    mesh = {"fsdp": 2, "tensor": 2}
    Trained(config(**SECTIONS, mesh=mesh, memory={"remat": "full"}), devices=4, updates=2).agrees_with(alone)


@pytest.mark.parametrize("base", [None, exhaustive("nf4")])
def test_merging_replaces_only_these_rows(alone, base):
    """Also in a quantized embedding, which stays quantized."""
    sections = {**SECTIONS, "adapter": {**SECTIONS["adapter"], "kind": "qlora" if base else "lora", "base": base}}
    trained = alone if base is None else Trained(config(**sections), updates=2)
    model = nnx.merge(trained.built.model.graphdef, trained.state.params)
    ids = jnp.arange(model.cfg.vocab, dtype=jnp.int32)[None]
    expected = np.asarray(model.embedding(ids, jnp.float32))[0]
    adapters.merge(model)
    assert model.embedding.lora is None
    merged = np.asarray(model.embedding(ids, jnp.float32))[0]
    np.testing.assert_allclose(merged, expected, atol=0.02 if base else 0)  # nf4 rounds the rows again


def test_an_embedding_has_one_adapter(alone):
    model = nnx.merge(alone.built.model.graphdef, alone.state.params)
    with pytest.raises(UserError, match="adapter of the embedding"):
        adapters.tokens(model, [1])


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": {"preset": "tiny", "tie_embeddings": True}}, "does not support model.tie_embeddings=true"),
        ({"adapter": {**SECTIONS["adapter"], "targets": ["*"]}}, "does not support adapter.targets"),
        ({"adapter": {**SECTIONS["adapter"], "token_indices": [5, 5]}}, "contains 5 more than once"),
        ({"adapter": {**SECTIONS["adapter"], "token_indices": [100000]}}, "contains 100000, but model.vocab="),
        ({"adapter": {"kind": "prompt", "token_indices": [1]}}, "requires adapter.kind=lora, dora or qlora"),
        ({"optimizer": {"trainable": ["embedding.*"]}}, "embedding.weight in optimizer.trainable"),
    ],
)
def test_what_is_refused(sections, message):
    with pytest.raises(UserError, match=message):
        config(**{**SECTIONS, **sections})
