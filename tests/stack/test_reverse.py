"""Back through a stack with each layer's gradient in sight: what was kept, or made again by layers not yet changed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxmem.config.names import BOUNDARY
from jaxmem.stack.apply import apply_call, stack_call, stacked
from jaxmem.stack.call import StackOptions
from jaxmem.stack.reverse import Visitor, forward
from tests.stack.test_recompute_plan import Affine, layer


def test_gradients_are_those_of_jax_while_what_was_visited_is_spoilt():
    layers = 7
    graphdef, state = nnx.split(stacked(Affine, layers, nnx.Rngs(0)))
    weights, x = nnx.to_pure_dict(state), jnp.ones((2, 3))
    given = (jax.random.split(jax.random.key(1), layers), jnp.arange(1.0 * layers)), (jnp.float32(0.5), jnp.arange(3))

    def applied(weights, x, way):
        return apply_call(stack_call(nnx.merge(graphdef, weights), layer, x, *given, options=way))[0]

    def visited(weights, x, way):
        passed = forward(stack_call(nnx.merge(graphdef, weights), layer, x, *given, options=way))

        def visit(carried, number, dw, brought):
            weights, grads = carried
            put = lambda at, new: jax.lax.dynamic_update_index_in_dim(at, new, number, 0)  # noqa: E731
            grads = jax.tree.map(lambda at, g: put(at, g + 0.0 * brought), grads, dw)
            return jax.tree.map(lambda at: put(at, jnp.full(at.shape[1:], jnp.nan)), weights), grads

        begin = weights, jax.tree.map(jnp.zeros_like, weights)
        ready = lambda carried, number: carried[1]["b"][number, 0]  # noqa: E731
        (_, grads), g = passed.backward(2 * passed.y, Visitor(begin, lambda carried: carried[0], visit, ready))
        return grads, g

    expected = jax.jit(jax.grad(lambda *at: jnp.sum(applied(*at, StackOptions("none")) ** 2), (0, 1)))(weights, x)
    ways = [StackOptions(remat) for remat in ("full", "sqrt", "slots_2")] + [
        StackOptions("recursive", host=(BOUNDARY,))
    ]
    found = jax.jit(lambda *at: [visited(*at, way) for way in ways])(weights, x)
    for one in found:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), one, expected)


@pytest.mark.parametrize("remat", ["none", "full"])
def test_all_layers_may_read_the_input_of_the_first(remat):
    graphdef, state = nnx.split(stacked(Affine, 3, nnx.Rngs(0)))
    weights, x = nnx.to_pure_dict(state), jnp.arange(6.0).reshape(2, 3) / 6

    def call(weights, x):
        residual = lambda block, x, _, first: (jnp.sin(x * block.a + block.b) + first, None)  # noqa: E731
        return stack_call(nnx.merge(graphdef, weights), residual, x, None, x, options=StackOptions(remat))

    def visit(carried, number, dw, _):
        return jax.tree.map(lambda total, g: total.at[number].set(g), carried, dw)

    def visited(weights, x):
        passed = forward(call(weights, x))
        zeros = jax.tree.map(jnp.zeros_like, weights)
        return passed.backward(2 * passed.y, Visitor(zeros, lambda _: weights, visit))[0]

    expected = jax.jit(jax.grad(lambda weights, x: jnp.sum(apply_call(call(weights, x))[0] ** 2)))(weights, x)
    found = jax.jit(visited)(weights, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, expected)


@pytest.mark.parametrize("remat", ["none", "full"])
def test_micro_batches_share_arrays_without_rows(remat):
    """A mask and scales, whose first sizes are the number of micro-batches."""
    layers, rows, time = 3, 4, 2
    graphdef, state = nnx.split(stacked(Affine, layers, nnx.Rngs(0)))
    weights, x = nnx.to_pure_dict(state), jnp.arange(24.0).reshape(rows, time, 3) / 24
    mask, of_rows = jnp.tril(jnp.ones((time, time))), jnp.arange(1.0 * rows)[:, None, None]
    inputs = jnp.arange(1.0, layers * time + 1).reshape(layers, time), jnp.ones((layers, rows))

    def mixed(block, x, layer_input, shared):
        (of_time, scale), (mask, of_rows) = layer_input, shared
        x = jnp.einsum("ts,rsf->rtf", mask, x * block.a + block.b) + of_rows
        return x * of_time[:, None] * scale[:, None, None], None

    def call(weights, x):
        block = nnx.merge(graphdef, weights)
        return stack_call(block, mixed, x, inputs, (mask, of_rows), options=StackOptions(remat))

    def visit(carried, number, dw, _):
        return jax.tree.map(lambda total, g: total.at[number].set(g), carried, dw)

    expected = jax.grad(lambda *at: jnp.sum(apply_call(call(*at))[0] ** 2), (0, 1))(weights, x)
    passed = forward(call(weights, x), micro=2)
    zeros = jax.tree.map(jnp.zeros_like, weights)
    found = passed.backward(2 * passed.y, Visitor(zeros, lambda _: weights, visit))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, expected)
