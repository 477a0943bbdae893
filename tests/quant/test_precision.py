"""Number formats: what runs in which."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem.config import Precision, load_config
from jaxmem.config.devices import for_devices
from jaxmem.kernels import attention
from jaxmem.models.layers import RMSNorm
from jaxmem.models.losses import cross_entropy
from jaxmem.quant.precision import compute_dtype, rounded
from jaxmem.sharding.layout import layout_for
from jaxmem.sharding.weights import Storage, store


@pytest.mark.parametrize(
    ("asked", "platform", "given"),
    [
        ("auto", "cpu", jnp.float32),
        ("auto", "gpu", jnp.bfloat16),
        ("auto", "tpu", jnp.bfloat16),
        ("float32", "gpu", jnp.float32),
        ("bfloat16", "cpu", jnp.bfloat16),
    ],
)
def test_compute_follows_the_hardware_unless_asked(asked, platform, given):
    assert compute_dtype(Precision(compute=asked), platform) == given


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_weights_are_stored_in_the_configured_dtype(name):
    assert store(jnp.ones((2, 3)), ("embed", "mlp"), Storage(Precision(parameters=name))).dtype.name == name


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_vectors_are_stored_in_float32_whatever_they_were(name):
    vector = jnp.ones(3, jnp.bfloat16)
    assert store(vector, ("embed",), Storage(Precision(parameters=name))).dtype == jnp.float32
    with_master = Storage(Precision(parameters="bfloat16", master="remainder8"))
    assert store(vector, ("embed",), with_master).dtype == jnp.bfloat16


# ------------------------------------------------------------------ stochastic rounding


@pytest.mark.exhaustive
def test_stochastic_rounding_returns_a_neighbour_and_is_unbiased():
    x = jnp.asarray([1.001, -3.0007, 1e-20, 65535.0, -0.1], jnp.float32)
    keys = jax.random.split(jax.random.key(0), 20_000)
    drawn = np.asarray(jax.vmap(lambda key: rounded(x, jnp.bfloat16, key))(keys).astype(jnp.float32), np.float64)
    for values, exact in zip(drawn.T, np.asarray(x, np.float64), strict=True):
        low, high = np.unique(values)
        assert low < exact < high
        assert np.float32(high).view(np.int32) - np.float32(low).view(np.int32) in (2**16, -(2**16))
        assert abs(values.mean() - exact) < 5 * values.std() / len(keys) ** 0.5


def test_bfloat16_values_and_non_finite_values_are_unchanged():
    x = jnp.asarray([0.0, 1.0, -2.5, 3.0e38, jnp.inf, -jnp.inf, jnp.nan], jnp.bfloat16)
    found = rounded(x.astype(jnp.float32), jnp.bfloat16, jax.random.key(1))
    np.testing.assert_array_equal(found.astype(jnp.float32), x.astype(jnp.float32))


def test_stochastic_rounding_supports_bfloat16_only():
    with pytest.raises(ValueError, match="not float16"):
        rounded(jnp.ones(3), jnp.float16, jax.random.key(0))


@pytest.mark.exhaustive
def test_draws_do_not_depend_on_the_mesh():
    x, key = jax.random.normal(jax.random.key(2), (16, 8)), jax.random.key(3)
    layout = layout_for(
        for_devices(load_config("configs/demo.yaml", ["mesh.fsdp=4", "mesh.tensor=2"]), 8), jax.devices()
    )
    place = layout.sharding("weights", ("embed", "mlp"), x.shape)
    split = jax.jit(rounded, static_argnames="dtype", out_shardings=place)(jax.device_put(x, place), jnp.bfloat16, key)
    np.testing.assert_array_equal(np.asarray(split, np.float32), np.asarray(rounded(x, jnp.bfloat16, key), np.float32))


# ------------------------------------------------------------------ what must stay in float32


def test_a_norm_in_float16_overflows_where_ours_does_not():
    x = jnp.full((1, 64), 300.0, jnp.float16)
    assert not jnp.isfinite(jnp.mean(x * x, dtype=jnp.float16)).any()
    np.testing.assert_allclose(RMSNorm(64, 1e-5)(x).astype(jnp.float32), 1.0, rtol=1e-3)


def running_sum(x):
    """One at a time, in the values' own dtype."""
    return jax.lax.scan(lambda total, one: (total + one, None), jnp.zeros((), x.dtype), x)[0]


@pytest.mark.exhaustive
def test_a_loss_in_bfloat16_stands_still_where_ours_adds_up():
    """1,000 equal logits: log 1000 is 6.908. One at a time in bfloat16, a sum stops at 256: 5.545."""
    logits = jnp.zeros((1, 1, 1000), jnp.bfloat16)
    assert float(running_sum(jnp.exp(logits[0, 0]))) == 256
    loss = cross_entropy(logits, jnp.zeros((1, 1), jnp.int32))
    np.testing.assert_allclose(loss, np.log(1000), rtol=1e-6)


def test_a_softmax_in_bfloat16_adds_up_to_more_than_one_where_ours_does_not():
    k = jnp.zeros((1, 4096, 1, 1), jnp.bfloat16)
    weights = jnp.exp(k[0, :, 0, 0])
    assert float(jnp.sum((weights / running_sum(weights)).astype(jnp.float32))) == 16
    mixed = attention(jnp.ones((1, 1, 1, 1), jnp.bfloat16), k, jnp.ones_like(k))
    np.testing.assert_allclose(mixed.astype(jnp.float32), 1.0, atol=4e-3)  # the result is bfloat16
