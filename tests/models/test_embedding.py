"""The lookup in a sharded embedding matrix."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem.models.embedding import lookup, separate_lookup
from jaxmem.models.vocab_slices import VocabSlices
from jaxmem.sharding.layout import layout_for
from tests.step.conftest import config

# The mesh axes of the columns, outermost first: (fsdp, context), (context, fsdp), (fsdp, context, replica), and with
# rows over tensor.
COLUMNS = (
    ({"embed": ["fsdp", "context"]}, {"fsdp": 2, "context": 2, "tensor": 2}),
    ({"embed": ["context", "fsdp"]}, {"fsdp": 2, "context": 2, "tensor": 2}),
    ({"optimizer": ["replica"]}, {"replica": 2, "context": 2, "tensor": 2}),
    ({"optimizer": ["replica"]}, {"replica": 2, "fsdp": 2, "context": 2}),
)


@pytest.mark.parametrize(("rules", "mesh"), COLUMNS)
def test_rows_and_their_gradients_are_those_of_one_device_for_any_order_of_mesh_axes(rules, mesh):
    draw = np.random.default_rng(0)
    matrix, ids = jnp.asarray(draw.random((264, 32), np.float32)), draw.integers(0, 264, (8, 24), np.int32)
    weights = draw.random((8, 24, 32), np.float32)

    def weighted(matrix, ids):
        rows = lookup(matrix, ids, ("vocab", "embed"), jnp.float32)
        return jnp.sum(rows * weights), rows

    with layout_for(config(rules=rules, mesh=mesh), jax.devices()):
        (_, rows), gradient = jax.jit(jax.value_and_grad(weighted, has_aux=True))(matrix, ids)
    np.testing.assert_array_equal(rows, matrix[ids])
    expected = jax.grad(lambda matrix: jnp.sum(matrix[ids] * weights))(matrix)
    np.testing.assert_allclose(gradient, expected, rtol=1e-6)


@pytest.mark.parametrize("mesh", [{}, {"fsdp": 4}, {"fsdp": 2, "tensor": 2}])
def test_the_gradient_of_a_frequent_token_is_a_sum_in_float32(mesh):
    ids = jnp.zeros((8, 2048), jnp.int32)
    g = jnp.full((8, 2048, 32), 0.01, jnp.bfloat16)

    def weighted(matrix):
        return jnp.sum((lookup(matrix, ids, ("vocab", "embed"), jnp.bfloat16) * g).astype(jnp.float32))

    with layout_for(config(mesh=mesh), jax.devices()[: math.prod(mesh.values())]):
        gradient = jax.jit(jax.grad(weighted))(jnp.ones((264, 32), jnp.bfloat16))
    np.testing.assert_allclose(gradient[0].astype(jnp.float32), 16384 * float(g[0, 0, 0]), rtol=0.01)


def test_slices_of_one_row_have_the_gradient_of_this_row():
    matrix, ids = jnp.ones((3, 4)), jnp.asarray([[0, 1, 1], [1, 0, 0]])
    result = separate_lookup(matrix, ids, ("vocab", "embed"), jnp.float32)
    slices = VocabSlices(vocab=3, width=1)
    g = jax.random.normal(jax.random.key(0), (*ids.shape, 4))
    rows = [result.weight_gradient(g, matrix, slices, jnp.int32(j)) for j in range(slices.count)]
    np.testing.assert_allclose(jnp.concatenate(rows), result.weight_gradient(g, matrix), rtol=1e-6)
