"""Codes bitwise equal to those of bitsandbytes; errors and bits of the papers; shapes, axes, stacks."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmem.errors import UserError
from jaxmem.quant import FORMATS, dynamic_code, quantize
from tests.support.tiers import cases

# Made by tests/quant/bitsandbytes_reference.py.
RECORDED = np.load(Path(__file__).parent / "data" / "bitsandbytes.npz")


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def suited(name, x):
    """Values that a format is for: udynamic8 has no negative ones."""
    return jnp.abs(x) if name.startswith("udynamic") else x


def bits(q):
    return q.nbytes * 8 / np.prod(q.shape)


# ------------------------------------------------------------------ against bitsandbytes


@pytest.mark.parametrize("name", ["nf4", "fp4"])
def test_4_bit_codes_scales_and_values_equal_those_of_bitsandbytes(name):
    q = quantize(jnp.asarray(RECORDED["x"]), name, 64)
    ours, theirs = np.asarray(q.codes).ravel(), RECORDED[f"{name}_codes"].ravel()
    if name == "fp4":  # which of its two zeros a tiny value gets differs between its own kernels
        ours, theirs = (np.stack([codes >> 4, codes & 15]) for codes in (ours, theirs))
        ours, theirs = (np.where(codes == 8, 0, codes) for codes in (ours, theirs))
    np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(np.asarray(q.scale).ravel(), RECORDED[f"{name}_scale"].ravel())
    np.testing.assert_array_equal(q.dequantize(), RECORDED[f"{name}_values"])


def test_blocks_along_the_input_dimension_equal_blocks_of_the_transpose_in_torch():
    q = quantize(jnp.asarray(RECORDED["x"].T), "nf4", 64, axis=-2)
    np.testing.assert_array_equal(np.asarray(q.codes).T.ravel(), RECORDED["nf4_codes"].ravel())


@pytest.mark.parametrize(("theirs", "ours"), [("signed", "dynamic8"), ("unsigned", "udynamic8")])
def test_dynamic_codes_equal_those_of_bitsandbytes(theirs, ours):
    np.testing.assert_array_equal(
        np.asarray(dynamic_code(8, signed=theirs == "signed"), np.float32), RECORDED[f"{theirs}_code"]
    )
    q = quantize(suited(ours, jnp.asarray(RECORDED["x"])), ours, 256)
    np.testing.assert_array_equal(np.asarray(q.codes).ravel(), RECORDED[f"{theirs}_codes"].ravel())
    np.testing.assert_array_equal(np.asarray(q.scale).ravel(), RECORDED[f"{theirs}_scale"].ravel())


@pytest.mark.parametrize("name", ["nf4", "fp4"])
def test_double_quantization_error_is_at_most_that_of_bitsandbytes(name):
    x = RECORDED["x"]
    ours = np.asarray(quantize(jnp.asarray(x), name, 64, double_quant=True).dequantize()) - x
    theirs = RECORDED[f"{name}_double_values"] - x
    # Their rows of all scales share one group; ours have one each.
    assert (ours**2).mean(axis=1) == pytest.approx((theirs**2).mean(axis=1), rel=0.05) or (
        (ours**2).mean(axis=1) <= 1.05 * (theirs**2).mean(axis=1)
    ).all()


# ------------------------------------------------------------------ errors and bits


@pytest.mark.parametrize(
    ("name", "block", "double", "mean", "square"),
    [
        ("nf4", 64, False, 0.0728, 0.00846),
        ("nf4", 64, True, 0.0729, 0.00847),
        ("int8", 64, False, 0.0050, None),
        ("int8", 256, False, 0.0060, None),
        ("dynamic8", 256, False, 0.0085, None),
        ("fp8_e4m3", 256, False, 0.0177, None),
    ],
)
def test_errors_on_normal_values_equal_the_published_ones(name, block, double, mean, square):
    x = normal(256, 4096)
    error = np.asarray(quantize(x, name, block, double_quant=double).dequantize() - x, np.float64)
    assert np.abs(error).mean() == pytest.approx(mean, rel=0.01)
    if square:
        assert (error**2).mean() == pytest.approx(square, rel=0.01)


@pytest.mark.parametrize("shape", [(4096, 4096), (4096, 14336), (14336, 4096), (8192, 28672), (28672, 8192)])
def test_nf4_with_double_quantization_takes_4_135_bits_on_real_weights(shape):
    q = jax.eval_shape(
        lambda x: quantize(x, "nf4", 64, axis=-2, double_quant=True), jax.ShapeDtypeStruct(shape, jnp.float32)
    )
    assert 4.125 < bits(q) < 4.135


@pytest.mark.parametrize("name", FORMATS)
def test_bytes_are_those_of_the_codes_and_the_block_scales(name):
    q = quantize(suited(name, normal(16, 512)), name, 64)
    scale = 8 if name == "mxfp4" else 64 if FORMATS[name].affine else 32
    assert bits(q) == FORMATS[name].bits + scale / 64
    assert q.shape == (16, 512)
    assert q.ndim == q.codes.ndim == q.scale.ndim


@pytest.mark.parametrize("name", FORMATS)
def test_values_of_the_format_are_unchanged_by_quantization(name):
    """Quantized again, values stay what they are. The largest is positive: signed dynamic codes lack -1."""
    once = quantize(suited(name, normal(4, 256)).at[:, ::32].set(5.0), name, 32)
    twice = quantize(once.dequantize(), name, 32)
    np.testing.assert_allclose(twice.dequantize(), once.dequantize(), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("name", FORMATS)
def test_values_are_rounded_to_the_nearest_value_of_the_format(name):
    form, x = FORMATS[name], np.linspace(0, 1, 1001, dtype=np.float32)
    every = np.arange(256).astype(np.int8 if name == "int8" else np.uint8)
    every = jnp.asarray(every if form.bits == 8 else every[: 2**form.bits])
    if name.startswith("fp8"):
        every = jax.lax.bitcast_convert_type(every, jnp.dtype(form.dtype))
    values = np.asarray(form.decode(every), np.float64)
    values = values[np.isfinite(values) & (np.abs(values) <= 1)]
    nearest = np.abs(x[:, None] - values).min(axis=1)
    found = np.abs(np.asarray(form.decode(form.encode(jnp.asarray(x), None)), np.float64) - x)
    np.testing.assert_allclose(found, nearest, atol=3e-7)  # halfway either will do


# One of each way to encode: symmetric and affine integers, floats, code books with and without a sign.
DRAWN = ("int8", "int4", "nf4", "dynamic8", "uint5", "fp8_e4m3", "mxfp4", "udynamic8")


@pytest.mark.parametrize("name", cases(DRAWN, "int8", "int4", "nf4", "dynamic8"))
def test_stochastic_rounding_is_unbiased(name):
    x = normal(1, 64)
    x = jnp.abs(x) if "dynamic" in name else x  # the signed ones lack -1
    nearest = quantize(x, name).dequantize()
    drawn = jax.vmap(lambda key: quantize(x, name, key=key).dequantize())(jax.random.split(jax.random.key(0), 4000))
    spread = np.asarray(drawn).std(axis=0).max()  # a value near one of the format's is hardly ever moved
    np.testing.assert_array_less(np.abs(np.asarray(drawn).mean(axis=0) - x), 5 * spread / 4000**0.5 + 1e-6)
    assert float(jnp.abs(drawn - nearest).max()) > 0 or float(jnp.abs(nearest - x).max()) < 1e-6


def test_mxfp4_decodes_every_code_with_every_scale_exactly():
    """E2M1 and E8M0 of the OCP specification, by their definitions in float64."""
    codes, exponents = np.arange(16), np.arange(1, 255)
    exponent, mantissa = codes >> 1 & 3, codes & 1
    e2m1 = np.where(exponent == 0, mantissa / 2, (1 + mantissa / 2) * 2.0 ** (exponent - 1)) * np.where(
        codes > 7, -1, 1
    )
    q = quantize(jnp.zeros((254, 32)), "mxfp4", 32)
    packed = jnp.asarray(np.tile(codes[::2] << 4 | codes[1::2], (254, 2)).astype(np.uint8))
    q = dataclasses.replace(q, codes=packed, scale=jnp.asarray(exponents[:, None].astype(np.uint8)))
    expected = np.tile(e2m1, 2) * 2.0 ** (exponents[:, None] - 127)
    normal_range = (np.abs(expected) >= 2.0**-126) & (np.abs(expected) < 2.0**128) | (expected == 0)
    found = np.asarray(q.dequantize(), np.float64)
    np.testing.assert_array_equal(found[normal_range], expected[normal_range])
    assert np.isnan(dataclasses.replace(q, scale=jnp.full_like(q.scale, 255)).dequantize()).all()
    # The values of the format stay what they are.
    same = dataclasses.replace(q, codes=packed[20:230], scale=q.scale[20:230])
    np.testing.assert_array_equal(quantize(same.dequantize(), "mxfp4", 32).dequantize(), same.dequantize())


# ------------------------------------------------------------------ shapes


@pytest.mark.parametrize("name", ["int8", "uint4", "int3"])
@pytest.mark.parametrize(("axis", "double"), [(0, False), (0, True), (1, True)])
def test_blocks_along_any_dimension_with_a_shorter_last_block(name, axis, double):
    x = normal(21, 19, 23)
    moved = quantize(jnp.moveaxis(x, axis, -1), name, 8, double_quant=double).dequantize()
    q = quantize(x, name, 8, axis, double_quant=double)
    assert q.shape == x.shape
    np.testing.assert_allclose(q.dequantize(), jnp.moveaxis(moved, -1, axis), atol=0.05 if double else 0)


@pytest.mark.exhaustive
@settings(max_examples=10)  # each is another program to compile
@given(st.integers(1, 70), st.integers(1, 70))
def test_a_shorter_last_block_does_not_change_the_others(size, block):
    x = normal(size)
    whole = size // block * block
    q = np.asarray(quantize(x, "int8", block).dequantize())
    if whole:
        np.testing.assert_allclose(q[:whole], quantize(x[:whole], "int8", block).dequantize(), rtol=1e-6)
    if size > whole:
        np.testing.assert_allclose(q[whole:], quantize(x[whole:], "int8", None).dequantize(), rtol=1e-6)


def test_scales_per_channel_and_per_array():
    x = normal(4, 6)
    assert quantize(x, "int8", None).scale.shape == (4, 1)
    assert quantize(x, "int8", None, axis=0).scale.shape == (1, 6)
    q = quantize(x, "uint8", axis=None)
    assert (q.scale.shape, q.offset.shape) == ((1, 1), (1, 1))
    assert float(q.offset[0, 0]) == float(x.min())
    assert q.requantize(x).scale.shape == (1, 1)
    assert quantize(x[:, :1], "int4", None, axis=0).requantize(x[:, :1]).codes.shape == (2, 1)


def test_a_short_last_block_has_the_range_of_its_own_values():
    """Not of zeros, from which all of them are far."""
    x = jnp.linspace(5.0, 6.0, 10)
    step = np.ptp(np.asarray(x[8:])) / 255
    np.testing.assert_allclose(quantize(x, "uint8", 8).dequantize()[8:], x[8:], atol=0.51 * step, rtol=3e-7)


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3), (1,), (1, 1)])
@pytest.mark.parametrize("name", ["int8", "uint4", "nf4"])
@pytest.mark.parametrize("double_quant", [False, True])
def test_empty_arrays_and_single_values(shape, name, double_quant):
    q = quantize(jnp.ones(shape), name, double_quant=double_quant)
    np.testing.assert_allclose(q.dequantize(), np.ones(shape), rtol=1e-6)


def test_zeros_stay_zeros():
    np.testing.assert_array_equal(quantize(jnp.zeros((2, 64)), "nf4").dequantize(), np.zeros((2, 64)))


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("name", ["int8", "uint4", "nf4", "mxfp4", "dynamic8"])
def test_a_block_with_nan_is_nan_and_others_are_not(name, axis):
    """The maximum of XLA ignores NaN on a CPU where it uses vector instructions, so blocks are in a matrix here."""
    x = normal(64, 64).at[3, 5].set(jnp.nan)
    of_block = (3, slice(0, 32)) if axis == -1 else (slice(0, 32), 5)
    expected = np.zeros(x.shape, bool)
    expected[of_block] = True
    np.testing.assert_array_equal(np.isnan(quantize(x, name, 32, axis).dequantize()), expected)


def test_dequantize_returns_the_original_dtype_unless_given_another():
    q = quantize(normal(64).astype(jnp.bfloat16), "int8")
    assert q.dequantize().dtype == jnp.bfloat16
    assert q.dequantize(jnp.float32).dtype == jnp.float32


def test_vmap_and_scan_over_layers_equal_quantizing_the_stack():
    x = normal(3, 32, 16)
    make = lambda w: quantize(w, "nf4", 16, axis=-2, double_quant=True)  # noqa: E731
    stacked, mapped = make(x), jax.vmap(make)(x)
    for one, other in zip(jax.tree.leaves(stacked), jax.tree.leaves(mapped), strict=True):
        np.testing.assert_array_equal(one, other)
    _, layers = jax.lax.scan(lambda _, q: (None, q.dequantize()), None, stacked)
    np.testing.assert_array_equal(layers, stacked.dequantize())


def test_errors():
    for call, message in (
        (lambda: quantize(normal(4), "nf5"), "unknown format 'nf5'; did you mean nf4"),
        (lambda: quantize(jnp.arange(4), "int8"), "supports floating-point arrays, not int32"),
        (lambda: quantize(jnp.float32(1.0), "int8"), "scalars"),
        (lambda: quantize(normal(4), "int8", axis=1), "axis=1 is out of range for an array of 1 dimensions"),
        (lambda: quantize(normal(4), "int8", 0), "block_size=0; expected a positive integer"),
    ):
        with pytest.raises(UserError, match=message):
            call()
