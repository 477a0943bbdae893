"""Rows with the weights of their group: equal to float64 by definition, with memory that does not grow with groups."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem.kernels.grouped_matmul import map_groups, sort_rows

CASES = {  # rows, choices of each, groups, inputs, outputs; some groups have no rows
    "several": (40, 2, 4, 8, 6),
    "all": (10, 3, 3, 5, 4),
    "empty groups": (3, 1, 9, 3, 2),
    "one row": (1, 2, 5, 4, 4),
    "one group": (70, 1, 1, 4, 3),
    "several blocks": (150, 1, 2, 4, 3),
}


def matmul(weights, frozen, x, values):
    return (x @ weights["w"] + x @ frozen["w"]) * values[:, None]


def arrays(case):
    rows, choices, groups, inputs, outputs = CASES[case]
    rng = np.random.default_rng(0)
    chosen = np.argsort(rng.random((rows, groups)), axis=1)[:, :choices].astype(np.int32)
    floats = [rng.standard_normal(s) for s in ((rows, inputs), (groups, inputs, outputs), (rows, choices))]
    return chosen, floats, rng.standard_normal((rows, outputs)), rng.standard_normal((groups, inputs, outputs))


@pytest.mark.parametrize("counts_blocks", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_results_and_gradients_are_those_of_float64(case, counts_blocks):
    chosen, (x, w, shares), g, frozen = arrays(case)

    def run(x, w, shares):
        groups, order = sort_rows(jnp.asarray(chosen), w.shape[0])
        values = shares.reshape(-1)[order]
        frozen32 = {"w": jnp.asarray(frozen, jnp.float32)}
        return map_groups(matmul, {"w": w}, frozen32, x, values, groups, counts_blocks=counts_blocks)

    y, back = jax.vjp(run, *(jnp.asarray(a, jnp.float32) for a in (x, w, shares)))
    of_x, of_w, of_shares = back(jnp.asarray(g, jnp.float32))
    own = (w + frozen)[chosen]  # [rows, choices, inputs, outputs]
    np.testing.assert_allclose(y, np.einsum("ri,rkio,rk->ro", x, own, shares), atol=1e-4)
    np.testing.assert_allclose(of_x, np.einsum("ro,rkio,rk->ri", g, own, shares), atol=1e-4)
    np.testing.assert_allclose(of_shares, np.einsum("ri,rkio,ro->rk", x, own, g), atol=1e-4)
    wanted = np.zeros_like(w)
    np.add.at(wanted, chosen, np.einsum("ri,ro,rk->rkio", x, g, shares))
    np.testing.assert_allclose(of_w, wanted, atol=1e-4)


def test_under_vmap():
    chosen, (x, w, shares), _, frozen = arrays("several")
    groups, order = sort_rows(jnp.asarray(chosen), w.shape[0])
    own, values = {"w": jnp.asarray(w, jnp.float32)}, jnp.asarray(shares, jnp.float32).reshape(-1)[order]

    def run(x):
        return map_groups(matmul, own, {"w": jnp.asarray(frozen, jnp.float32)}, x, values, groups)

    both = jnp.stack([jnp.asarray(x, jnp.float32), jnp.ones(x.shape, jnp.float32)])
    np.testing.assert_allclose(jax.vmap(run)(both), jnp.stack([run(one) for one in both]), rtol=1e-5, atol=1e-5)


def test_sorting_leaves_out_rows_of_other_groups():
    groups, order = sort_rows(jnp.asarray([[1, 5], [-1, 0], [1, 2]]), 2)
    assert groups.starts.tolist() == [0, 1]
    assert groups.stops.tolist() == [1, 3]
    assert groups.rows[:3].tolist() == [1, 0, 2]
    assert order[:3].tolist() == [3, 0, 4]


def test_temporary_memory_does_not_grow_with_the_number_of_groups():
    """In addition to the weight gradient, which is a result."""

    def temporaries(groups):
        def loss(x, w, chosen):
            own, order = sort_rows(chosen, groups)
            values = jnp.ones(order.shape, jnp.float32)
            y = map_groups(lambda weights, _, x, __: jax.nn.silu(x @ weights), w, {}, x, values, own)
            return jnp.sum(y)

        shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((2048, 64), (groups, 64, 64))]
        chosen = jax.ShapeDtypeStruct((2048, 4), jnp.int32)
        compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*shapes, chosen).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    few, many = temporaries(8), temporaries(128)
    assert many < 1.2 * few
    assert many < 4 * 2048 * (64 + 64) * 4  # x and y in float32, and what one block needs
