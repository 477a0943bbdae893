"""A stack of which some layers learn: the same result and gradients as of all, and none of the others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxmem.sharding.weights import StoredWeight
from jaxmem.stack.apply import apply_call, stack_call, stacked
from jaxmem.stack.call import StackOptions
from tests.support.tiers import cases

LAYERS = 6


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.w = nnx.Param(jax.random.normal(rngs.params(), (4, 4)) / 2, axes=("a", "b"))
        self.b = nnx.Param(jnp.ones(4), axes=("b",))


def weight(value):
    """As a network has it: computed with what rests, its gradient goes to `at`."""
    if not isinstance(value, StoredWeight):
        return value
    return value.stored if value.proxy is None else value.stored + (value.proxy - jax.lax.stop_gradient(value.proxy))


def layer(block, x, one, beside):
    y = jnp.tanh(x @ weight(block.w.get_value()) + weight(block.b.get_value()) + one * beside)
    return y, jnp.sum(y)


@pytest.mark.parametrize("remat", cases(["none", "sqrt"], "sqrt"))
def test_gradients_are_those_of_all_layers_where_they_learn(remat):
    graphdef, state = nnx.split(stacked(Layer, LAYERS, nnx.Rngs(0)))
    params = nnx.to_pure_dict(state)
    x, inputs, beside = jnp.ones((3, 4)), jnp.arange(LAYERS, dtype=jnp.float32), jnp.float32(0.1)

    def loss(params, x):
        blocks = nnx.merge(graphdef, params)
        y, sums = apply_call(stack_call(blocks, layer, x, inputs, beside, options=StackOptions(remat=remat)))
        return jnp.sum(jnp.square(y)) + jnp.sum(sums)

    def of_some(own, x):
        some = {"w": StoredWeight(params["w"], own["w"], (1, 4, 5)), "b": StoredWeight(params["b"], own["b"], (0, 1))}
        return loss(some, x)

    picked = {"w": np.array([1, 4, 5]), "b": np.array([0, 1])}
    own = {name: params[name][at] for name, at in picked.items()}
    every = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(params, x)
    some = jax.jit(jax.value_and_grad(of_some, argnums=(0, 1)))(own, x)
    np.testing.assert_allclose(some[0], every[0], rtol=1e-6)
    np.testing.assert_allclose(some[1][1], every[1][1], rtol=1e-5)
    for name, at in picked.items():
        # Some are differences of terms of about 1, of which float32 rounds the sums.
        np.testing.assert_allclose(some[1][0][name], every[1][0][name][at], rtol=1e-5, atol=1e-7)
