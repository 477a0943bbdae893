"""Prompt tuning: what is trained, and what a network computes after a prompt in training and generation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.traverse_util import flatten_dict

from jaxmem import adapters
from jaxmem.adapters.trained_parts import Prompt
from jaxmem.errors import UserError
from jaxmem.inference.generate import Conversation, Generator
from jaxmem.step.programs import program
from tests.step.conftest import SMALL, Trained, config

SECTIONS = {
    "adapter": {"kind": "prompt", "virtual_tokens": 4},
    "data": {"sequence_length": 20, "packing": False},
    "optimizer": {"epsilon": 1e-3, "learning_rate": 1e-2},
}


@pytest.fixture(scope="module")
def alone():
    return Trained(config(**SECTIONS), updates=2)


@pytest.mark.exhaustive
def test_only_the_prompt_is_trained_on_any_mesh(alone):
    before, after = flatten_dict(alone.first), flatten_dict(alone.params)
    assert {path for path in before if (before[path] != after[path]).any()} == {("prompt", "weight")}
    assert alone.built.model.trainable_count == 4 * 32
    mesh = {"fsdp": 2, "tensor": 2}
    cfg = config(**SECTIONS, mesh=mesh, memory={"remat": "full"})
    Trained(cfg, devices=4, updates=2, begin=alone).agrees_with(alone)


def test_a_quantized_base_stays_quantized():
    placed = program(
        config(**{**SECTIONS, "adapter": {**SECTIONS["adapter"], "base": "nf4"}}), jax.devices()[:1]
    ).spec.state
    assert placed.params["head"]["weight"].format == "nf4"
    assert placed.params["prompt"]["weight"].dtype == np.float32


def test_the_gradient_of_a_prompt_is_summed_over_many_sequences_in_float32():
    module = Prompt(jnp.zeros((2, 4)), vocab=8)
    ids = jnp.tile(jnp.asarray([[8, 9, 3]], jnp.int32), (1000, 1))

    def loss(module):
        return jnp.sum(module(ids, jnp.zeros((*ids.shape, 4), jnp.bfloat16), jnp.bfloat16).astype(jnp.float32))

    np.testing.assert_allclose(nnx.grad(loss)(module).weight[...], 1000)


@pytest.mark.exhaustive
def test_a_prompt_is_read_before_every_text(alone):
    """Prompts of two lengths, and a conversation, are continued as whole sequences behind the rows would be."""
    built, params = alone.built, alone.state.params
    plain = nnx.merge(built.model.graphdef, params)
    plain.prompt = None  # by hand: a table of tokens with the prompt's rows behind it
    table = jnp.concatenate([params["embedding"]["weight"], params["prompt"]["weight"]])
    plain.embedding.weight = nnx.Param(table, axes=("vocab", "embed"))
    prompts = [np.array([5, 9, 2], np.int32), np.array([7], np.int32)]
    generator = Generator(built, params)
    said = np.stack(list(generator(prompts, 3)))
    for row, prompt in enumerate(prompts):
        ids = np.append(prompt, said[:2, row]).astype(np.int32)
        logits = jax.jit(plain)(jnp.asarray([[*range(264, 268), *ids]], jnp.int32))[0, 4:]
        assert np.argmax(logits, axis=-1)[-3:].tolist() == said[:, row].tolist()
    found = jax.jit(nnx.merge(built.model.graphdef, params))(jnp.asarray(ids)[None])[0]
    np.testing.assert_allclose(found, logits, rtol=1e-5, atol=1e-5)
    assert list(Conversation(generator)(prompts[0], 3)) == said[:, 0].tolist()


@pytest.mark.exhaustive
def test_merging_a_prompt_is_an_error(alone):
    with pytest.raises(UserError, match=r"merge does not support adapter\.kind=prompt"):
        adapters.merge(nnx.merge(alone.built.model.graphdef, alone.state.params))


GEMMA = {
    "vocab": 264, "tie_embeddings": True, "norms": "both", "norm_offset": True, "activation": "gelu_tanh",
    "scale_embeddings": True, "window": 8, "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip


def test_a_prompt_of_gemma_begins_with_scaled_embeddings():
    """As PEFT has it: the embedding layer of transformers scales, and a prompt is put after it."""
    cfg = config(**SECTIONS, model={"preset": "tiny", **SMALL, **GEMMA})
    params = program(cfg, jax.devices()[:1]).initialise().params
    embeddings = params["embedding"]["weight"] * SMALL["embed"] ** 0.5
    for row in params["prompt"]["weight"]:
        assert np.isclose(embeddings, row, rtol=1e-6).all(axis=1).any()
