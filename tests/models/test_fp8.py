"""Matmuls in FP8: equal to their definition in float64, and their error."""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from jaxmem.models import fp8
from jaxmem.models.linear import Linear, apply_linears, matmul

TOKENS, INPUTS, OUTPUTS = 96, 64, 48
LARGEST = {ml_dtypes.float8_e4m3fn: 448.0, ml_dtypes.float8_e5m2: 57344.0}
SCALINGS = ("tensor", "row", "mxfp8")
every_scaling = pytest.mark.parametrize("scaling", SCALINGS)


def arrays():
    """x, w and the gradient of x @ w."""
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (2, TOKENS // 2, INPUTS), (INPUTS, OUTPUTS), (2, TOKENS // 2, OUTPUTS)
    return tuple(jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))


def matrix(x):
    return np.asarray(x, np.float64).reshape(-1, x.shape[-1])


def rounded(x, dtype, scaling):
    """x rounded to the format under scales that are powers of two, in float64: a scale for all values, for each row, or
    for each 32 values of a row."""
    parts = x
    if scaling == "mxfp8":
        parts = np.pad(x, ((0, 0), (0, -x.shape[1] % 32))).reshape(len(x), -1, 32)
    largest = np.abs(parts).max(None if scaling == "tensor" else -1, keepdims=True)
    scale = 2.0 ** np.ceil(np.log2(largest / LARGEST[dtype]))
    result = (parts / scale).astype(dtype).astype(np.float64) * scale
    return result.reshape(len(x), -1)[:, : x.shape[1]]


def defined(x, w, g, scaling):
    """x @ w, and the gradients of x and w, from rounded operands in float64."""
    x, w, g = map(matrix, (x, w, g))
    e4m3, e5m2 = LARGEST
    of_gradients = e4m3 if scaling == "mxfp8" else e5m2

    def dot(a, b, *dtypes):
        return rounded(a, dtypes[0], scaling) @ rounded(b.T, dtypes[1], scaling).T

    return dot(x, w, e4m3, e4m3), dot(g, w.T, of_gradients, e4m3), dot(x.T, g, e4m3, of_gradients)


def computed(x, w, g, scaling):
    y, back = jax.vjp(lambda x, w: matmul(x, w, scaling), x, w)
    return tuple(map(matrix, (y, *back(g))))


def relative_error(a, b):
    return np.linalg.norm(np.asarray(a, np.float64) - b) / np.linalg.norm(b)


@every_scaling
def test_results_are_those_of_rounded_operands(scaling):
    for mine, theirs in zip(computed(*arrays(), scaling), defined(*arrays(), scaling), strict=True):
        assert relative_error(mine, theirs) < 1e-6


@pytest.mark.exhaustive
@every_scaling
def test_the_error_of_results_and_gradients(scaling):
    """e4m3 rounds with a relative error of 2.6 % on average, e5m2 with 5 %; bfloat16 adds little to them."""
    x, w, g = map(matrix, arrays())
    results = zip(
        computed(*(x.astype(jnp.bfloat16) for x in arrays()), scaling), (x @ w, g @ w.T, x.T @ g), strict=True
    )
    errors = [relative_error(mine, exact) for mine, exact in results]
    of_gradients = 0.045 if scaling == "mxfp8" else 0.07
    limits = (0.045, of_gradients, of_gradients)
    assert all(0.02 < error < limit for error, limit in zip(errors, limits, strict=True)), errors


def test_an_outlier_costs_precision_in_its_row_only_with_row_scales():
    x, w, _ = arrays()
    x = x.at[0, 0].multiply(1e6)
    exact = matrix(x[0, 1:]) @ matrix(w)
    by_row, by_tensor = (relative_error(matmul(x, w, scaling)[0, 1:], exact) for scaling in ("row", "tensor"))
    assert by_row < 0.045
    assert by_tensor > 0.5


def test_an_outlier_costs_precision_in_its_block_only_with_block_scales():
    x, w, _ = arrays()
    x = x.at[..., 0].multiply(1e6)
    w = w.at[:32].set(0.0)  # the results show the other block of each row
    by_block, by_row = (relative_error(matmul(x, w, scaling), x @ w) for scaling in ("mxfp8", "row"))
    assert by_block < 0.045
    assert by_row > 0.5


@pytest.mark.exhaustive
@every_scaling
def test_small_gradients_do_not_underflow(scaling):
    x, w, g = arrays()
    for mine, theirs in zip(computed(x, w, 1e-20 * g, scaling)[1:], defined(x, w, g, scaling)[1:], strict=True):
        assert relative_error(1e20 * mine, theirs) < 0.1
    y, of_x, of_w = computed(x, w, 0 * g, scaling)
    assert np.any(y)
    assert not np.any(of_x)
    assert not np.any(of_w)


@every_scaling
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_value_that_is_not_finite_is_not_hidden(scaling, value):
    x, w, _ = arrays()
    assert not np.isfinite(matmul(x.at[1, 2, 3].set(value), w, scaling)[1, 2]).any()


def test_scales_are_the_least_powers_of_two():
    x = jnp.array([0.0, 1.0, 1.0001, 3.0, jnp.inf])
    scales = fp8._next_power_of_two(x)
    assert scales.tolist() == [2.0**-126, 1.0, 2.0, 4.0, np.inf]
    assert fp8._exponents(scales).astype(jnp.float32).tolist()[:-1] == scales.tolist()[:-1]
    assert np.isnan(fp8._exponents(scales)[-1].astype(jnp.float32))


@every_scaling
def test_what_is_saved_for_the_backward_pass(scaling):
    """With one scale per operand, the input as it is rounded; with a scale per row, which differs between passes, the
    input itself."""
    x, w, _ = arrays()
    _, back = jax.vjp(lambda x: matmul(x, w, scaling), x)
    dtypes = {str(saved.dtype) for saved in jax.tree.leaves(back) if saved.shape == x.shape}
    assert dtypes == {"uint8" if scaling == "tensor" else "float32"}


def test_layers_of_one_input_save_it_once():
    """Within a scan, which stacks what is saved, and with the results and gradients of each layer by itself."""
    x, *_ = arrays()
    layers = [Linear(nnx.Rngs(seed), INPUTS, INPUTS, (None, None)) for seed in (0, 1)]
    for layer in layers:
        layer.scaling = "tensor"

    def repeated(project, x):
        return jax.lax.scan(lambda x, _: (sum(project(x)), None), x, length=2)[0]

    together = jax.vjp(partial(repeated, lambda x: apply_linears(x, layers, (None, None))), x)
    apart = jax.vjp(partial(repeated, lambda x: [layer(x) for layer in layers]), x)
    saved, saved_apart = ([y for y in jax.tree.leaves(back) if y.dtype == jnp.uint8] for _, back in (together, apart))
    assert sum(y.size for y in saved_apart) - sum(y.size for y in saved) == 2 * x.size
    np.testing.assert_array_equal(together[0], apart[0])
    np.testing.assert_array_equal(together[1](x)[0], apart[1](x)[0])
