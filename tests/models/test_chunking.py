"""Chunks of tokens and groups of heads: the same values and gradients in fewer bytes, gradients reduced once."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxmem.config import Rope
from jaxmem.models.attention import Attention, AttentionSpec, Tokens
from jaxmem.models.block import Block, GatedMlp
from jaxmem.models.chunking import Chunking
from jaxmem.models.layers import RMSNorm
from jaxmem.models.network import Execution
from jaxmem.models.rope import angles
from jaxmem.step.programs import program
from tests.step.conftest import SMALL, config

ROWS, TIME, EMBED = 2, 40, 32
TOKENS, CHUNK, HIDDEN = 256, 32, 4096


def block(chunking):
    rngs = nnx.Rngs(0)
    spec = AttentionSpec(EMBED, 8, 4, 8, causal=True, bias=True, output_bias=True, qk_norm=1e-5)
    attention = Attention(rngs, spec, Execution(chunking=chunking))
    norms = RMSNorm(EMBED, 1e-5), RMSNorm(EMBED, 1e-5)
    return Block(attention, GatedMlp(rngs, EMBED, 48, bias=True), norms, 0.1)


@pytest.mark.exhaustive
def test_a_chunked_block_equals_the_whole():
    """Output, and its gradients by weights and input; with dropout, two documents, a last chunk that is not full."""
    x = jax.random.normal(jax.random.key(0), (ROWS, TIME, EMBED))
    row = jnp.broadcast_to(jnp.arange(TIME), (ROWS, TIME))
    turned, documents = angles(row, Rope(), 8), jnp.where(row < 13, 1, 2)
    keys = jax.random.split(jax.random.key(3), ROWS)

    def found(chunking):
        graphdef, state = nnx.split(block(chunking))

        def loss(weights, x):
            y, *_ = nnx.merge(graphdef, weights)(x, Tokens(turned, documents), keys)
            return jnp.sum(jnp.sin(y)), y

        return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(nnx.to_pure_dict(state), x)

    whole = found(Chunking())
    for chunking in (Chunking(16, 1), Chunking(13, 4)):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), found(chunking), whole)


@pytest.fixture(scope="module")
def steps():
    """A decoder's step over two devices, by how many tokens a chunk has."""
    model = {"preset": "tiny", **SMALL, "mlp": HIDDEN, "vocab": 264}
    given = {"model": model, "data": {"sequence_length": TOKENS}, "batch": {"global_size": 8}, "mesh": {"fsdp": 2}}
    found = {}
    for tokens in (TOKENS, CHUNK):
        cfg = config(**given, memory={"remat": "full", "mlp_chunk": tokens})
        found[tokens] = program(cfg, jax.devices()[:2]).lower_step().compile()
    return found


@pytest.mark.exhaustive
def test_intermediates_exist_for_one_chunk(steps):
    whole, chunks = (steps[tokens].memory_analysis().temp_size_in_bytes for tokens in (TOKENS, CHUNK))
    hidden = 4 * TOKENS * HIDDEN * 4  # of all tokens of a device
    assert whole - chunks > 4 * hidden * (1 - CHUNK / TOKENS)


@pytest.mark.exhaustive
def test_chunks_communicate_once(steps):
    """Weights are gathered before the first chunk, gradients reduced after the last: no message in a loop within the
    one over layers."""
    sent = {tokens: re.findall(r" (?:all-\w+|reduce-scatter)\(.*", step.as_text()) for tokens, step in steps.items()}
    assert len(sent[CHUNK]) <= len(sent[TOKENS])
    assert not [line for line in sent[CHUNK] if line.count("while/body") > 1]
