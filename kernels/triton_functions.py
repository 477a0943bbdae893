"""Functions of the Triton kernels: random words from positions, and 8-bit dynamic codes computed by arithmetic.

The values of a block are scaled to -1 ... 1. Dynamic codes (`codes.dynamic_code`) divide each decade evenly, with
twice as many codes as the decade below. So the index of a code among those of its sign, as a float, has the decade in
its exponent and the position in the decade in its mantissa, and arithmetic in registers replaces a table of 256 values.
With h = index + 1/2, and 2^o the largest power of two up to h, the value of an unsigned code is 0.9e-7 * 5^o * (h - 8/9
* 2^o), a continuous function of h, whose inverse encodes. Signed codes have half as many indices: there h is twice the
index plus 1."""

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
    """The value of an 8-bit dynamic code, with a relative error of 2e-6."""
    if signed:
        place = 2.0 * code.to(tl.float32) - 254.0
        h = tl.abs(place) + 1.0
    else:
        place = code.to(tl.float32)
        h = place + 1.5
    exponent = (float_bits(h) >> 23) - 127
    power = (float_bits(h) & 0x7F800000).to(tl.float32, bitcast=True)
    # 0.9e-7 * 5^exponent, from exact factors.
    fives = tl.where((exponent & 1) != 0, 5.0, 1.0) * tl.where((exponent & 2) != 0, 25.0, 1.0)
    fives = fives * tl.where((exponent & 4) != 0, 625.0, 1.0) * tl.where((exponent & 8) != 0, 390625.0, 1.0) * 0.9e-7
    # The value of the last code is the end of its interval, since the middle would be above one.
    size = tl.minimum((h - 0.8888888888888888 * power) * fives, 1.0)
    size = tl.where(exponent == 0, 0.0, size)
    return tl.where(place < 0.0, -size, size)


@program
def dynamic8_code(x, inverse, signed: tl.constexpr, zero: tl.constexpr):
    """The nearest code of x * inverse, which is in -1 ... 1; without `zero` at least the first code above zero.

    The last value of a decade is half an interval below the decade's end, and the first value of the next decade is
    half an interval, five times as large, above this end. So values up to one small interval (0.2 large intervals)
    above the end have the code below the end: they are reduced by 0.2. Near an end both decades then lead to the same
    code, so the decade need not be known exactly.
    """
    top: tl.constexpr = 64.0 if signed else 128.0  # intervals of the last decade
    part: tl.constexpr = 0.5555555555555556 if zero else 1.1111111111111112
    # Half of the first border between two codes, which is where a decade's border is after the shift by a half.
    least: tl.constexpr = (2.85e-7 if signed else 2.175e-7) if zero else 2e-7
    scaled = x * (inverse * part)
    size = tl.abs(scaled)
    if zero:
        size = size + tl.maximum(size, least * part)
    else:
        size = tl.maximum(size, least * part)
    # The bits of a float grow almost like its logarithm. With this step per decade, the logarithm of the end of each of
    # six decades is at most 0.8 intervals of the lower decade too small and 0.2 too large.
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
    code = tl.where(scaled >= (1.0 - 0.225 / top) * part, 255.0, code)  # 0.25 intervals below one
    return tl.minimum(tl.maximum(code, 0.0), 255.0).to(tl.int32).to(tl.uint8)
