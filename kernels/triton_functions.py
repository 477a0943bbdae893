"""Functions that the Triton kernels share: random words from positions, and 8-bit dynamic codes as arithmetic.

A block's numbers are scaled to -1 ... 1. The dynamic codes (`codes.dynamic_code`) divide each power of ten evenly, the
larger ones twice as finely as the one before, so the position of a code among those of its sign, as a float, has the
decade in its exponent and the part of the decade in its mantissa: arithmetic in registers replaces a lookup in a list
of 256 by every thread. With h, the position and a half, and 2^o, the power of two that is not above h, a code without
sign has the value 0.9e-7 * 5^o * (h - 8/9 * 2^o), a continuous function of h of which encoding is the inverse. Signed
codes have half as many positions: there h is twice the position and one.
"""

import inspect
from typing import Any

import triton
import triton.language as tl
from triton.language import core  # noqa: F401  (the interpreter replaces functions of this module)


def program(function: Any) -> Any:
    """`triton.jit` of the undecorated function: Triton reads its source."""
    return triton.jit(inspect.unwrap(function))


@program
def scramble(x):
    """`draws.scramble`, bit for bit."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@program
def uniform(seed, place):
    """`draws.uniform`, bit for bit."""
    word = scramble(seed ^ ((place >> 1).to(tl.uint32) * 0x9E3779B9))
    half = tl.where((place & 1) == 1, word >> 16, word & 0xFFFF)
    return (half | 0x43000000).to(tl.float32, bitcast=True) - 127.99999237060547  # 128 - 2^-17


@program
def float_bits(x):
    return x.to(tl.int32, bitcast=True)


@program
def dynamic8_value(code, signed: tl.constexpr):
    """The value of an 8-bit dynamic code, to 2e-6 of it."""
    if signed:
        place = 2.0 * code.to(tl.float32) - 254.0
        h = tl.abs(place) + 1.0
    else:
        place = code.to(tl.float32)
        h = place + 1.5
    exponent = (float_bits(h) >> 23) - 127
    power = (float_bits(h) & 0x7F800000).to(tl.float32, bitcast=True)
    # 0.9e-7 * 5^exponent, whose factors are exact.
    fives = tl.where((exponent & 1) != 0, 5.0, 1.0) * tl.where((exponent & 2) != 0, 25.0, 1.0)
    fives = fives * tl.where((exponent & 4) != 0, 625.0, 1.0) * tl.where((exponent & 8) != 0, 390625.0, 1.0) * 0.9e-7
    # The last code is the end of its part, not the middle, which would be above one.
    size = tl.minimum((h - 0.8888888888888888 * power) * fives, 1.0)
    size = tl.where(exponent == 0, 0.0, size)
    return tl.where(place < 0.0, -size, size)


@program
def dynamic8_code(x, inverse, signed: tl.constexpr, zero: tl.constexpr):
    """The nearest code of x * inverse, which lies in -1 ... 1; without `zero` at least the first code above it.

    A decade's last value is half a part below its end, and the next value half of a part five times as large above it:
    numbers up to one (small) part above the end, 0.2 of the larger ones, belong below it. There a number is reduced by
    those 0.2. So near an end both decades lead to the same code, and the decade need not be known exactly.
    """
    top: tl.constexpr = 64.0 if signed else 128.0  # parts of the last decade
    part: tl.constexpr = 0.5555555555555556 if zero else 1.1111111111111112
    # Half of the first border: where a decade's would be once the numbers below are moved halfway to it.
    least: tl.constexpr = (2.85e-7 if signed else 2.175e-7) if zero else 2e-7
    scaled = x * (inverse * part)
    size = tl.abs(scaled)
    if zero:
        size = size + tl.maximum(size, least * part)
    else:
        size = tl.maximum(size, least * part)
    # A float's bits rise nearly as its logarithm. Where 10/9 of the numbers that end a decade have risen by such a
    # step, the logarithm is between 0.8 parts of the lesser decade too small and 0.2 too large for each of six decades.
    logarithm = (float_bits(size) - 0x3F800000).to(tl.float32) * 1.1920928955078125e-07
    decades = tl.floor((0.1125 - logarithm) * 0.29888218064439).to(tl.int32)  # below the last one; a step is 3.3458
    h = size * tl.exp2(decades.to(tl.float32) * 3.321928094887362) + 0.8888888888888888
    h = (float_bits(h) - (decades << 23)).to(tl.float32, bitcast=True)
    below = h - 0.2 / top
    h = tl.where(((float_bits(h) ^ float_bits(below)) & 0x7F800000) != 0, below, h)
    code = tl.floor(top * h)
    if signed:
        code = tl.where(scaled < 0.0, 127.0 - code, 127.0 + code)
    else:
        code = code - 1.0
    code = tl.where(scaled >= (1.0 - 0.225 / top) * part, 255.0, code)  # 0.25 parts below one
    return tl.minimum(tl.maximum(code, 0.0), 255.0).to(tl.int32).to(tl.uint8)
