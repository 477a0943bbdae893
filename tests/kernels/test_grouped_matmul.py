"""Rows with the weights of their group: equal to float64 by definition, with memory that does not grow with groups."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem.kernels.codes import KERNEL_FORMATS
from jaxmem.kernels.grouped_matmul import map_chunks, map_groups, sort_rows, sum_of_groups
from jaxmem.kernels.grouped_matmul.quantized_tiles import QuantizedMatrices, QuantizedScales
from jaxmem.kernels.grouped_matmul.triton import grouped_matmul
from jaxmem.quant import quantize
from tests.support.tiers import cases

CASES = {  # rows, choices of each, groups, inputs, outputs; some groups have no rows
    "several": (40, 2, 4, 8, 6),
    "all": (10, 3, 3, 5, 4),
    "empty groups": (3, 1, 9, 3, 2),
    "one row": (1, 2, 5, 4, 4),
    "one group": (70, 1, 1, 4, 3),
    "square": (40, 2, 4, 6, 6),
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


@pytest.mark.parametrize(
    ("case", "parts"),
    cases(
        [*((case, 1) for case in CASES), ("square", 2), ("several blocks", 2)],
        ("empty groups", 1),
        ("several blocks", 2),
    ),
)
def test_results_and_gradients_are_those_of_float64(case, parts):
    chosen, (x, w, shares), g, frozen = arrays(case)

    def run(x, w, shares):
        groups = sort_rows(jnp.asarray(chosen), w.shape[0])
        values = shares.reshape(-1)[groups.order]
        frozen32 = {"w": jnp.asarray(frozen, jnp.float32)}
        return map_groups(matmul, {"w": w}, frozen32, x, values, groups, parts=parts)

    y, back = jax.vjp(run, *(jnp.asarray(a, jnp.float32) for a in (x, w, shares)))
    of_x, of_w, of_shares = back(jnp.asarray(g, jnp.float32))
    own = (w + frozen)[chosen]  # [rows, choices, inputs, outputs]
    np.testing.assert_allclose(y, np.einsum("ri,rkio,rk->ro", x, own, shares), atol=1e-4)
    np.testing.assert_allclose(of_x, np.einsum("ro,rkio,rk->ri", g, own, shares), atol=1e-4)
    np.testing.assert_allclose(of_shares, np.einsum("ri,rkio,ro->rk", x, own, g), atol=1e-4)
    wanted = np.zeros_like(w)
    np.add.at(wanted, chosen, np.einsum("ri,ro,rk->rkio", x, g, shares))
    np.testing.assert_allclose(of_w, wanted, atol=1e-4)


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", [7, 1000])
def test_chunks_have_the_results_and_gradients_of_blocks(size):
    """Half of the groups belong to another device."""
    chosen, (x, w, shares), g, frozen = arrays("square")
    count, g = w.shape[0] // 2, jnp.asarray(g, jnp.float32)
    groups = sort_rows(jnp.asarray(chosen), count)

    def chunk(weights, frozen, x, values, groups):
        row = jnp.arange(x.shape[0])[:, None]
        member = ((row >= groups.starts) & (row < groups.stops)).astype(x.dtype)
        return jnp.einsum("ri,rg,gio,r->ro", x, member, weights["w"] + frozen["w"], values)

    def run(how, w, x, shares):
        values, others = shares.reshape(-1)[groups.order], {"w": jnp.asarray(frozen[:count], jnp.float32)}
        return how({"w": w}, others, x, values, groups)

    found = [
        jax.vjp(partial(run, how), *(jnp.asarray(a, jnp.float32) for a in (w[:count], x, shares)))
        for how in (partial(map_chunks, chunk, size), partial(map_groups, matmul))
    ]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), *((y, back(g)) for y, back in found))


@pytest.mark.exhaustive
def test_under_vmap():
    chosen, (x, w, shares), _, frozen = arrays("several")
    groups = sort_rows(jnp.asarray(chosen), w.shape[0])
    own, values = {"w": jnp.asarray(w, jnp.float32)}, jnp.asarray(shares, jnp.float32).reshape(-1)[groups.order]

    def run(x):
        return map_groups(matmul, own, {"w": jnp.asarray(frozen, jnp.float32)}, x, values, groups)

    both = jnp.stack([jnp.asarray(x, jnp.float32), jnp.ones(x.shape, jnp.float32)])
    np.testing.assert_allclose(jax.vmap(run)(both), jnp.stack([run(one) for one in both]), rtol=1e-5, atol=1e-5)


def test_sorting_leaves_out_rows_of_other_groups():
    groups = sort_rows(jnp.asarray([[1, 5], [-1, 0], [1, 2]]), 2)
    assert groups.starts.tolist() == [0, 1]
    assert groups.stops.tolist() == [1, 3]
    assert groups.rows[:3].tolist() == [1, 0, 2]
    assert groups.order[:3].tolist() == [3, 0, 4]


def test_temporary_memory_does_not_grow_with_the_number_of_groups():
    """In addition to the weight gradient, which is a result."""

    def temporaries(groups):
        def loss(x, w, chosen):
            own = sort_rows(chosen, groups)
            values = jnp.ones(own.order.shape, jnp.float32)
            y = map_groups(lambda weights, _, x, __: jax.nn.silu(x @ weights), w, {}, x, values, own)
            return jnp.sum(y)

        shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((2048, 64), (groups, 64, 64))]
        chosen = jax.ShapeDtypeStruct((2048, 4), jnp.int32)
        compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*shapes, chosen).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    few, many = temporaries(8), temporaries(128)
    assert many < 1.2 * few
    assert many < 4 * 2048 * (64 + 64) * 4  # x and y in float32, and what one block needs


FUSED = {  # rows, choices, groups, inputs, outputs, dtype, format; the last rows belong to no group
    "float32": (40, 2, 4, 70, 33, "float32", None),
    "bfloat16": (20, 3, 5, 24, 130, "bfloat16", None),
    "one group": (30, 1, 1, 16, 16, "float32", None),
    "nf4": (24, 2, 3, 128, 48, "float32", "nf4"),
    "int8": (24, 1, 3, 64, 40, "bfloat16", "int8"),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", FUSED)
def test_the_fused_matmul_equals_float64(case):
    """Rows read through their index, biases, and gradients of all arguments."""
    rows, choices, count, inputs, outputs, dtype, form = FUSED[case]
    rng = np.random.default_rng(0)
    chosen = np.argsort(rng.random((rows, count)), axis=1)[:, :choices].astype(np.int32)
    chosen[-2:] = count
    groups = sort_rows(jnp.asarray(chosen), count)
    shapes = (rows, inputs), (count, inputs, outputs), (count, outputs), (rows * choices,), (rows, outputs)
    x, w, bias, shares, g = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)
    quantized, exact = None, w
    if form is not None:
        q = quantize(w, form, 32, -2, double_quant=form == "nf4")
        scale = QuantizedScales(q.scale.codes, q.scale.scale, q.scale.offset) if form == "nf4" else q.scale
        quantized = QuantizedMatrices(q.codes, scale, KERNEL_FORMATS[form], 32, inputs, outputs)
        exact = q.dequantize(dtype)

    def run(x, w, bias, shares):
        y = grouped_matmul(x, w if quantized is None else quantized, bias, shares, groups, True)
        return sum_of_groups(y, groups, rows), y

    def back(x, w, bias, shares, g):
        y, pull, sorted_y = jax.vjp(run, x, w, bias, shares, has_aux=True)
        return y, sorted_y, pull(g)

    y, sorted_y, grads = jax.jit(back)(x, w, bias, shares, g)
    x, w, bias, shares, g = (np.asarray(a, np.float64) for a in (x, exact, bias, shares, g))
    group, source = np.append(chosen.reshape(-1), count)[np.asarray(groups.order)], np.asarray(groups.rows)
    real = group < count
    group, source, shares = group[real], source[real], shares[real]
    each = np.einsum("ri,rio->ro", x[source], w[group]) + shares[:, None] * bias[group]
    wanted_y, of_x, of_w, of_bias = (np.zeros(a.shape) for a in (g, x, w, bias))
    np.add.at(wanted_y, source, each)
    np.add.at(of_x, source, np.einsum("ro,rio->ri", g[source], w[group]))
    np.add.at(of_w, group, np.einsum("ri,ro->rio", x[source], g[source]))
    np.add.at(of_bias, group, shares[:, None] * g[source])
    of_shares = np.append(np.sum(g[source] * bias[group], axis=1), np.zeros((~real).sum()))
    tolerance = 3e-6 if dtype == "float32" else 2**-6
    pairs = [(y, wanted_y), (grads[0], of_x), (grads[2], of_bias), (grads[3], of_shares)]
    for found, wanted in pairs if form else [*pairs, (grads[1], of_w)]:
        assert np.abs(np.asarray(found, np.float64) - wanted).max() < tolerance * np.abs(wanted).max()
    assert not np.asarray(sorted_y[real.sum() :], np.float32).any()
