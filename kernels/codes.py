"""What codes stand for, as lists, and as arithmetic for kernels, which have no cheap way to look into a list of 256.

A block's numbers are scaled to -1 ... 1; nf4 and fp4 are lists of 16. The dynamic codes (Dettmers et al.,
arXiv:2110.02861) divide each power of ten evenly, the larger ones twice as finely as the one before. So the place of a
code among those of its sign, as a float, has the decade in its exponent and the part of the decade in its mantissa:
some ten operations and no memory, in place of a look into a table by every thread.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

# The 16 quantiles of a normal distribution: Dettmers et al., arXiv:2305.14314, appendix E, in float32.
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_FP4 = (0.0, 0.0052083333, 2 / 3, 1.0, 1 / 3, 0.5, 1 / 6, 0.25)  # by its three lower bits; the highest is the sign
FP4 = (*_FP4, *(-value for value in _FP4))

DECADES = 7
_LOG2_10 = math.log2(10.0)


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


def dynamic8_value(code: Shaped[Array, "*shape"], *, signed: bool) -> Float[Array, "*shape"]:
    """What an 8-bit dynamic code stands for, to the last bit or two of a float32."""
    place = code.astype(jnp.int32)
    place = place - 127 if signed else place + (place > 0).astype(jnp.int32)
    count = jnp.abs(place)  # 1 or 2 in the first decade, twice as many in each that follows
    bits = jax.lax.bitcast_convert_type(count.astype(jnp.float32), jnp.int32)
    octave = (bits >> 23) - 127
    part = jax.lax.bitcast_convert_type((bits & 0x7FFFFF) | 0x3F800000, jnp.float32) - 1.0
    middle = part + jax.lax.bitcast_convert_type((126 - octave) << 23, jnp.float32)  # 2 ** (-1 - octave)
    decade = octave if signed else octave - 1
    size = (0.1 + 0.9 * middle) * jnp.exp2((decade - (DECADES - 1)).astype(jnp.float32) * _LOG2_10)
    size = jnp.where(count == _one(signed), 1.0, size)
    return jnp.where(count == 0, 0.0, jnp.where(place < 0, -size, size))


def dynamic8_code(x: Float[Array, "*shape"], *, signed: bool) -> Int[Array, "*shape"]:
    """The nearest code of numbers in -1 ... 1. Within a decade that is the part that a number lies in. A decade's last
    value is half a part below its end, and the next value half of a part five times as large above it: numbers up to
    one (small) part above the end belong below it."""
    size = jnp.abs(x)
    decade = jnp.zeros(x.shape, jnp.int32)  # 0: to zero; 8: to one
    for end in _ends(signed):
        decade += (size > end).astype(jnp.int32)
    octave = decade if not signed else decade - 1
    wide = size * jnp.exp2((DECADES - decade).astype(jnp.float32) * _LOG2_10)  # 0.1 ... 1
    parts = jax.lax.bitcast_convert_type((octave + 127) << 23, jnp.float32)
    part = jnp.clip(jnp.floor((wide - 0.1) * (1 / 0.9) * parts), 0.0, parts - 1.0)
    place = (parts + part).astype(jnp.int32)
    place = jnp.where(decade == 0, 0, jnp.where(decade > DECADES, _one(signed), place))
    if signed:
        return 127 + jnp.where(x < 0, -jnp.minimum(place, _one(signed) - 1), place)  # there is no -1
    return jnp.maximum(place - 1, 0)


def _one(signed: bool) -> int:
    """The place of 1 among the positive codes."""
    return 2**DECADES if signed else 2 ** (DECADES + 1)


def _ends(signed: bool) -> tuple[float, ...]:
    """Above which numbers belong to no lesser decade, from zero to one."""
    code = np.asarray(dynamic_code(8, signed=signed), np.float64)
    code = code[code >= 0]
    first = [2**d if signed else 2 ** (d + 1) - 1 for d in range(DECADES + 1)]  # of each decade; the last one is 1
    return tuple(float((code[place - 1] + code[place]) / 2) for place in first)
