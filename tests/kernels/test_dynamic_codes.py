"""Dynamic codes as the Triton kernels compute them, against the lists of `codes.dynamic_code`."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triton.language as tl
from triton.language import core  # noqa: F401  (the interpreter replaces functions of this module)

from jaxmem.kernels import triton_launch
from jaxmem.kernels.codes import dynamic_code
from jaxmem.kernels.draws import uniform
from jaxmem.kernels.triton_functions import dynamic8_code, dynamic8_value, program
from jaxmem.kernels.triton_functions import uniform as uniform_in_triton


@dataclass(frozen=True)
class Static:
    size: int
    signed: bool = False
    zero: bool = True


@program
def encode(x_ptr, out_ptr, s: tl.constexpr):
    at = tl.arange(0, s.size)
    tl.store(out_ptr + at, dynamic8_code(tl.load(x_ptr + at), 1.0, s.signed, s.zero))


@program
def decode(codes_ptr, out_ptr, s: tl.constexpr):
    at = tl.arange(0, s.size)
    tl.store(out_ptr + at, dynamic8_value(tl.load(codes_ptr + at), s.signed))


@program
def draw(seeds_ptr, out_ptr, s: tl.constexpr):
    at = tl.arange(0, s.size)
    tl.store(out_ptr + at, uniform_in_triton(tl.load(seeds_ptr + at), at))


def interpreted(kernel, x, dtype, **options):
    size = 1 << (len(x) - 1).bit_length()
    arrays, outputs = [jnp.asarray(np.resize(x, size))], [jax.ShapeDtypeStruct((size,), dtype)]
    how = triton_launch.Launch(grid=(1,), static=Static(size, **options))
    (found,) = triton_launch.launch(kernel, arrays, outputs, how)
    return np.asarray(found)[: len(x)]


@pytest.mark.parametrize("signed", [True, False])
def test_values(signed):
    found = interpreted(decode, np.arange(256, dtype=np.uint8), jnp.float32, signed=signed)
    np.testing.assert_allclose(found, dynamic_code(8, signed=signed), rtol=1e-6)


@pytest.mark.parametrize("signed", [True, False])
def test_codes_on_both_sides_of_every_border(signed):
    """The nearest, except where a number is as far from two codes to 4e-5 of their distance: around all borders, and
    densely around the decades' ends, where a kernel does not know for certain in which decade a number is."""
    code = np.asarray(dynamic_code(8, signed=signed))
    border = (code[1:] + code[:-1]) / 2
    near = [np.float32(border) * (1 + np.float32(2.0**-23) * n) for n in range(-20, 21)]
    ends = [10.0**-k * np.linspace(0.9, 1.2, 30001) for k in range(8)]
    x = np.concatenate([*near, *ends, [0.0, 1e-40, 1e-30, 1e-8, 1.0]]).astype(np.float32)
    x = np.concatenate([x, -x]) if signed else np.abs(x)
    x = x[np.abs(x) <= 1]
    nearest = np.searchsorted(border, x.astype(np.float64))
    for zero in [True] if signed else [True, False]:
        found = interpreted(encode, x, jnp.uint8, signed=signed, zero=zero).astype(int)
        wanted = nearest if zero else np.maximum(nearest, 1)
        other = found != wanted
        assert np.all(np.abs(found - wanted) <= 1)
        below = np.minimum(found, wanted)[other]
        assert np.all(np.abs(x[other] - border[below]) <= 4e-5 * (code[below + 1] - code[below]))


def test_the_same_draws():
    seeds = np.random.default_rng(0).integers(0, 2**32, 4096, np.uint32)
    wanted = uniform(jnp.asarray(seeds), jnp.arange(4096, dtype=jnp.int32))
    np.testing.assert_array_equal(interpreted(draw, seeds, jnp.float32), wanted)
