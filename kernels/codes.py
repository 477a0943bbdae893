"""What codes stand for, as lists, and as arithmetic for kernels, which have no cheap way to look into a list of 256.

A block's numbers are scaled to -1 ... 1; nf4 and fp4 are lists of 16. The dynamic codes (Dettmers et al.,
arXiv:2110.02861) divide each power of ten evenly, the larger ones twice as finely as the one before. So the place of a
code among those of its sign, as a float, has the decade in its exponent and the part of the decade in its mantissa:
a few instructions and no memory, in place of a look into a table by every thread.

In detail: with h, the place and a half, and 2^o, the power of two that is not above h, a code of no sign stands for
0.9e-7 * 5^o * (h - 8/9 * 2^o), a continuous function of h of which encoding is the inverse. Signed codes have half as
many places: there h is twice the place and one.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8

from .instructions import LARGE, bits, exp2, fma, fma_saturated, from_bits, large_down, large_from_bytes, to_bytes

# The 16 quantiles of a normal distribution: Dettmers et al., arXiv:2305.14314, appendix E, in float32.
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_FP4 = (0.0, 0.0052083333, 2 / 3, 1.0, 1 / 3, 0.5, 1 / 6, 0.25)  # by its three lower bits; the highest is the sign
FP4 = (*_FP4, *(-value for value in _FP4))

DECADES = 7
_LOG2_10 = float(np.float32(math.log2(10.0)))
_EIGHT_NINTHS = 8 / 9
# log2(0.9e-7 * 5^o) from 2^-119 * (1 + (o - 1) / 16): the two floats that give all eight to 1e-6.
_SLOPE, _OFFSET = 37.15085220336914 * 2.0**119, -58.23442459106445
# A float's bits rise nearly as its logarithm does. Where 10/9 of the numbers that end a decade have risen by such a
# step, the logarithm is between 0.8 parts of the lesser decade too small and 0.2 too large for each of six decades.
_STEP, _START = 3.3458, 0.1125
# Where fractions are cut off whole steps alone can be added: so many, once the logarithm has what is missing to them.
_STEPS = 19
_MISSING = round((_STEPS * _STEP - 63 - _START) * 2**18)
_SIGN = -(2**31)


def dynamic_code(bits: int, *, signed: bool) -> tuple[float, ...]:
    """Each power of ten from 10^-(bits - 2) to 1, divided evenly: the larger ones twice as finely as the one before.

    >>> [round(value, 4) for value in dynamic_code(3, signed=False)]
    [0.0, 0.0325, 0.0775, 0.2125, 0.4375, 0.6625, 0.8875, 1.0]
    """
    found = [np.float32(0), np.float32(1)]
    for decade in range(bits - 1):
        parts = 2 ** (decade + (0 if signed else 1))
        # Counted from both ends with one rounding each: the very bits that other libraries' states have.
        step = float(np.float32(0.9) / np.float32(parts))
        low, high = (float(np.float32(0.1)) + step * np.arange(parts + 1), 1 - step * np.arange(parts + 1)[::-1])
        edges = np.concatenate([low[: (parts + 1) // 2], high[(parts + 1) // 2 :]]).astype(np.float32)
        middle = (edges[1:] + edges[:-1]) / np.float32(2) * np.float32(10.0 ** (decade - bits + 2))
        found += [*middle, *(-middle if signed else ())]
    return tuple(float(value) for value in sorted(found))


def dynamic8_value(code: UInt8[Array, "*shape"], *, signed: bool) -> Float[Array, "*shape"]:
    """What an 8-bit dynamic code stands for, to 2e-6 of it."""
    large = large_from_bytes(code)
    if signed:
        place = fma(large, 2.0, -2 * (LARGE + 127))
        h = jnp.abs(place) + 1.0
    else:
        place, h = large, large - (LARGE - 1.5)
    # Of 2 ... 256 the power of two. Of 1, which is zero's, something very small, and so is then 5^o: it is taken off.
    power = bits(h) & 0x43800000
    fives = exp2(fma(from_bits(power >> 4), _SLOPE, _OFFSET))
    # The last code, one, stands for the end of its part, not for the middle: it would be more than one.
    size = fma_saturated(fma(from_bits(power), -_EIGHT_NINTHS, h), fives, -(2.0**-56))
    return from_bits(bits(size) | (bits(place) & _SIGN)) if signed else size


def dynamic8_code(
    x: Float[Array, "*shape"],
    inverse: Float[Array, "*inverse"] | float = 1.0,
    *,
    signed: bool,
    zero: bool = True,
) -> UInt8[Array, "*shape"]:
    """The nearest code of x * inverse, which lies in -1 ... 1; without `zero` at least the first one above it.

    A decade's last value is half a part below its end, and the next value half of a part five times as large above it:
    numbers up to one (small) part above the end, 0.2 of the larger ones, belong below it. There a number is made less
    by those 0.2. So near an end both decades lead to the same code, and the decade need not be known exactly.
    """
    top = 2.0 ** (DECADES - 1 if signed else DECADES)  # parts of the last decade: below, h is in units of it
    part = 5 / 9 if zero else 10 / 9
    wide = x * (inverse * part)
    size = jnp.abs(wide) if signed else wide
    if zero:  # the first border is where a decade's would be once the numbers below are drawn halfway to `least`
        least = 2.85e-7 if signed else 2.175e-7
        size = size + jnp.maximum(size, least * part)
    else:
        size = jnp.maximum(size, 2e-7 * part)
    # Its exponent and mantissa, as the mantissa of a tiny float: 2^-124 * (1 + (31 + log2) / 32).
    tiny = from_bits((bits(size) >> 5) + _MISSING)
    less = large_down(tiny, -(2.0**129) / _STEP, _STEPS)  # decades than the last one
    tens = exp2(fma(less, _LOG2_10, -LARGE * _LOG2_10))
    h = from_bits(bits(fma(size, tens, _EIGHT_NINTHS)) - (bits(less) << 23))
    below = h - 0.2 / top
    h = jnp.where((bits(h) ^ bits(below)) & 0x7F800000 != 0, below, h)
    # From a quarter part below one on it is one.
    if not signed:
        return to_bytes(h, int(top), -1, jnp.uint8, down=True, last=(wide, (1 - 0.25 * (0.9 / top)) * part))
    # More than `end` there, and less than h before.
    end = 2 - 0.5 / top
    last = fma(wide, 4 * (10 / 9) / part, end - 4 * (10 / 9 - 0.25 / top))
    h = from_bits(bits(h - 0.5 / top) | (bits(wide) & _SIGN))
    return to_bytes(jnp.maximum(h, last), int(top), 127, jnp.uint8)  # there is no -1
