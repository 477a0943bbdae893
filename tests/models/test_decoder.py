"""The decoder: published sizes, causality, packing, positions, the cache."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxmem.config import Decoder as DecoderConfig
from jaxmem.config import load_config
from jaxmem.models.decoder import Decoder
from jaxmem.models.layers import dropout
from jaxmem.models.network import Execution
from jaxmem.stack.call import StackOptions


def preset(name, **fields):
    cfg = load_config({"name": "x", "model": {"preset": name, **fields}, "train": {"steps": 1}})
    return cfg.model


def small(**fields):
    base = {"vocab": 61, "layers": 2, "embed": 32, "mlp": 48, "heads": 4, "kv_heads": 2, "head_dim": 8}
    return DecoderConfig(**{**base, **fields})


@functools.cache
class Compiled:
    """A network whose methods run compiled; one for all tests that need the same."""

    def __init__(self, cfg, execution=Execution()):
        make = lambda: Decoder(cfg, nnx.Rngs(0), execution)  # noqa: E731
        self.graphdef, _ = nnx.split(nnx.eval_shape(make))
        self.params = jax.jit(lambda: nnx.to_pure_dict(nnx.state(make())))()
        self.call = jax.jit(lambda p, *args, **kw: nnx.merge(self.graphdef, p)(*args, **kw))
        self.extend = jax.jit(lambda p, *args: nnx.merge(self.graphdef, p).extend(*args))

    def __call__(self, *args, **kw):
        return self.call(self.params, *args, **kw)


def tokens(batch=2, time=13, seed=0):
    return jax.random.randint(jax.random.key(seed), (batch, time), 0, 61, jnp.int32)


def test_every_weight_has_logical_axes():
    network = nnx.eval_shape(lambda: Decoder(small(attention_bias=True, qk_norm=True), nnx.Rngs(0)))
    for path, variable in nnx.to_flat_state(nnx.split(network)[1]):
        assert len(variable.get_metadata()["axes"]) == len(variable.shape), path


def test_attention_is_causal():
    network = Compiled(small())
    a = tokens()
    b = a.at[:, 8].set((a[:, 8] + 1) % 61)
    before, after = network(a), network(b)
    np.testing.assert_array_equal(before[:, :8], after[:, :8])
    assert float(jnp.abs(before[:, 8:] - after[:, 8:]).max()) > 1e-3


@pytest.mark.exhaustive
def test_a_window_masks_earlier_tokens():
    network = Compiled(small(window=3, layers=1))
    a = tokens()
    b = a.at[:, 2].set((a[:, 2] + 1) % 61)
    before, after = network(a), network(b)
    np.testing.assert_allclose(before[:, 5:], after[:, 5:], atol=1e-6)
    assert float(jnp.abs(before[:, 4] - after[:, 4]).max()) > 1e-4


def test_packed_documents_do_not_attend_to_each_other():
    network = Compiled(small())
    first, second = tokens(1, 5, 1), tokens(1, 8, 2)
    packed = jnp.concatenate([first, second], axis=1)
    segments = jnp.asarray([[1] * 5 + [2] * 8], jnp.int32)
    positions = jnp.asarray([[*range(5), *range(8)]], jnp.int32)
    together = network(packed, positions, segments)
    np.testing.assert_allclose(together[:, :5], network(first), atol=2e-5)
    np.testing.assert_allclose(together[:, 5:], network(second), atol=2e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "fields",
    [
        {"window": 4, "tie_embeddings": True, "kv_heads": 4},
        {"qk_norm": True, "attention_bias": True},
        {
            "window": 3,
            "layer_types": ("sliding_attention", "full_attention"),
            "sliding_rope": {"theta": 9.0},
            "attention_soft_cap": 2.0,
            "qk_norm": "all_heads",
            "norms": "post",
        },
    ],
)
def test_decoding_with_a_kv_cache_equals_the_whole_sequence(fields):
    network = Compiled(small(**fields))
    ids = tokens(1, 11)
    whole = network(ids)
    cache = nnx.merge(network.graphdef, network.params).empty_cache(1, 16)
    for start, end in ((0, 5), (5, 10), (10, 11)):
        place = jnp.asarray(start, jnp.int32)
        logits, cache = network.extend(network.params, ids[:, start:end], cache, place)
        np.testing.assert_allclose(logits, whole[:, end - 1], atol=2e-5)


def test_dropout_scales_what_it_keeps():
    dropped = dropout(jnp.ones((4, 1000)), 0.25, jax.random.split(jax.random.key(0), 4))
    np.testing.assert_allclose(np.unique(dropped), [0, 4 / 3], rtol=1e-6)
    assert float(jnp.mean(dropped)) == pytest.approx(1, abs=0.05)


@pytest.mark.exhaustive
def test_dropout_needs_a_key_and_follows_it():
    network = Compiled(small(dropout=0.5))
    ids = tokens()
    still = network(ids)
    np.testing.assert_array_equal(still, network(ids))
    one, same, other = (network(ids, keys=jax.random.split(jax.random.key(k), 2)) for k in (1, 1, 2))
    np.testing.assert_array_equal(one, same)
    assert float(jnp.abs(one - other).max()) > 1e-3
    assert float(jnp.abs(one - still).max()) > 1e-3


@functools.cache
def gradient(remat):
    network = Compiled(small(dropout=0.3), Execution(stack=StackOptions(remat)))
    loss = lambda p: jnp.sum(jnp.square(network.call(p, tokens(), keys=jax.random.split(jax.random.key(3), 2))))  # noqa: E731
    return jax.jit(jax.grad(loss))(network.params)


@pytest.mark.exhaustive
@pytest.mark.parametrize("remat", ["full", "dots"])
def test_recompute_does_not_change_gradients(remat):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5 * float(jnp.abs(b).max())),
        gradient(remat),
        gradient("none"),
    )


def test_matmuls_in_bfloat16_norms_and_weights_in_float32():
    network = Compiled(small(), Execution(dtype=np.dtype(jnp.bfloat16)))
    jaxpr = str(jax.make_jaxpr(network)(tokens()))
    assert "bf16[2,13,48] = dot_general" in jaxpr
    assert "f32[2,13,48] = dot_general" not in jaxpr
    assert "rsqrt" in jaxpr
    assert not any("bf16" in line and "rsqrt" in line for line in jaxpr.splitlines())
    assert network(tokens()).dtype == jnp.bfloat16
    assert {x.dtype for x in jax.tree.leaves(network.params)} == {jnp.dtype(jnp.float32)}


def test_compile_time_does_not_grow_with_depth():
    def program_size(layers):
        network = nnx.eval_shape(lambda: Decoder(small(layers=layers), nnx.Rngs(0)))
        graphdef, state = nnx.split(network)
        lowered = jax.jit(lambda p, ids: nnx.merge(graphdef, p)(ids)).lower(nnx.to_pure_dict(state), tokens())
        return len(lowered.as_text())

    assert program_size(64) < 1.02 * program_size(2)
