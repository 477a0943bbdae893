"""Quantization formats: the values of the integer codes of a quantized array.

Each block of values is scaled into the range of the format, by its absmax (symmetric) or by its minimum and its range
(affine). Each value then becomes the nearest value of the format:

    int2 ... int8          evenly spaced in [-1, 1], symmetric
    uint2 ... uint8        evenly spaced in [0, 1], affine
    nf4                    quantiles of a normal distribution (Dettmers et al., arXiv:2305.14314)
    fp4                    1 sign, 2 exponent, 1 mantissa bit, with a zero
    mxfp4                  such floats (E2M1), scaled by powers of two in 8 bits (OCP Microscaling Formats 1.0)
    fp8_e4m3, fp8_e5m2     8-bit floats (Micikevicius et al., arXiv:2209.05433)
    dynamic8, udynamic8    each decade divided evenly, larger decades into more values; udynamic8: non-negative values
    dynamic4, udynamic4    the same in 4 bits (8-bit optimizers: Dettmers et al., arXiv:2110.02861)

Stochastic rounding chooses one of the two neighbouring values at random, so that the expectation is the original value.
The dynamic formats have no code for -1: values below their lowest one, -0.993 in 8 bits, are rounded up to it.

Codes of 2 to 6 bits are packed into bytes along one dimension, the first code in the highest bits. A group is the
smallest number of codes that fills complete bytes: four 2-bit or two 4-bit codes fill one byte; four 6-bit or eight
3-bit codes, three bytes; eight 5-bit codes, five bytes. Bits are unused only if the length is not a multiple of a
group.
"""

import math
import operator
from dataclasses import dataclass
from functools import cached_property, reduce

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped, UInt8

from jaxmem.kernels.codes import E2M1, FP4, NF4, dynamic_code

Values = Float[Array, "*shape"]  # values in the range of the format
Codes = Shaped[Array, "*shape"]
Draws = Float[Array, "*shape"] | None  # uniform in [0, 1) for stochastic rounding; None: round to nearest

# A format has `bits` per code and encodes values in its range. `affine`: blocks are scaled by minimum and range to
# [0, 1], else by their absmax to [-1, 1]. `block_size`: values per scale where a config does not set it.


@dataclass(frozen=True)
class Uniform:
    """Evenly spaced values: symmetric in [-1, 1], or affine in [0, 1]."""

    bits: int
    affine: bool = False

    @property
    def block_size(self) -> int:
        return 256 if self.bits == 8 else 64

    @property
    def steps(self) -> int:
        """Steps from 0 to 1."""
        return 2**self.bits - 1 if self.affine else 2 ** (self.bits - 1) - 1

    def encode(self, x: Values, draws: Draws) -> Codes:
        scaled = x * self.steps
        steps = jnp.round(scaled) if draws is None else jnp.floor(scaled + draws)
        # A draw just below 1 may round up beyond the range.
        steps = jnp.clip(steps, 0 if self.affine else -self.steps, self.steps)
        if self.bits == 8:
            return steps.astype(jnp.uint8 if self.affine else jnp.int8)
        return (steps + (0 if self.affine else self.steps)).astype(jnp.uint8)

    def decode(self, codes: Codes) -> Values:
        zero = 0 if self.affine or self.bits == 8 else self.steps
        return (codes.astype(jnp.float32) - zero) / self.steps


@dataclass(frozen=True)
class Codebook:
    """A list of values, in any order. A code is the index of its value."""

    values: tuple[float, ...]
    affine: bool = False

    @property
    def bits(self) -> int:
        return (len(self.values) - 1).bit_length()

    @property
    def block_size(self) -> int:
        return 256 if self.bits == 8 else 64

    @cached_property
    def _order(self) -> np.ndarray:
        """The codes in ascending order of their values; for equal values only the first code."""
        return np.unique(np.asarray(self.values, np.float32), return_index=True)[1].astype(np.uint8)

    @cached_property
    def _ascending(self) -> np.ndarray:
        return np.asarray(self.values, np.float32)[self._order]

    def encode(self, x: Values, draws: Draws) -> Codes:
        values = self._ascending
        if draws is None:
            nearest = _count_below(x, (values[1:] + values[:-1]) / 2)
        else:
            above = _count_below(x, values).clip(1, len(values) - 1)
            low = jnp.asarray(values)[above - 1]
            high = jnp.asarray(values)[above]
            nearest = jnp.where(x - low > draws * (high - low), above, above - 1)
        return jnp.asarray(self._order)[nearest]

    def decode(self, codes: Codes) -> Values:
        return jnp.asarray(self.values, jnp.float32)[codes]


@dataclass(frozen=True)
class Microscaled(Codebook):
    """A list of values whose scales are powers of two, stored as E8M0: an exponent in 8 bits, 2^(code - 127)."""

    block_size = 32

    def scale_codes(self, absmax: Values) -> UInt8[Array, "*shape"]:
        """The E8M0 scales of blocks: the least powers of two with which no value exceeds the largest of the format."""
        bits = jax.lax.bitcast_convert_type(absmax / max(self.values), jnp.uint32)  # the sum exceeds int32 for NaN
        return jnp.minimum((bits + (1 << 23) - 1) >> 23, 255).astype(jnp.uint8)  # 255: NaN or infinite


def power_of_two(codes: UInt8[Array, "*shape"]) -> Values:
    """The values of E8M0 codes, exact: 2^(code - 127); 0 for code 0, because XLA flushes 2^-127 to 0; NaN for 255.

    >>> power_of_two(jnp.asarray([126, 127, 129], jnp.uint8)).tolist()
    [0.5, 1.0, 4.0]
    """
    values = jax.lax.bitcast_convert_type(codes.astype(jnp.int32) << 23, jnp.float32)
    return jnp.where(codes == 255, jnp.nan, values)


@dataclass(frozen=True)
class Float8:
    """An 8-bit float, scaled so that its largest finite value is 1."""

    dtype: str
    bits: int = 8
    affine: bool = False
    block_size: int = 256

    @cached_property
    def _max(self) -> float:
        return float(jnp.finfo(self.dtype).max)

    @cached_property
    def _codebook(self) -> Codebook:
        values = np.arange(256, dtype=np.uint8).view(jnp.dtype(self.dtype)).astype(np.float32)
        return Codebook(tuple(np.where(np.isfinite(values), values, 0.0).tolist()))

    def encode(self, x: Values, draws: Draws) -> Codes:
        scaled = x * self._max
        if draws is None:
            return scaled.astype(self.dtype)
        return jax.lax.bitcast_convert_type(self._codebook.encode(scaled, draws), jnp.dtype(self.dtype))

    def decode(self, codes: Codes) -> Values:
        return codes.astype(jnp.float32) / self._max


def _count_below(x: Values, ascending: np.ndarray) -> Int[Array, "*shape"]:
    """For each x, the number of values in `ascending` that are less than x.

    A bin contains the floats with the same leading bits (sign, exponent, some of the mantissa). The bins are so narrow
    that each contains at most one of the values: a table has the number of values below the bin, and x is compared with
    the value in it. So two lookups in small tables suffice for any number of values; a binary search needs one per bit.
    """
    bits = next(bits for bits in range(15, 24) if int(_bins(ascending, bits)[1].max()) <= 1)
    key = jax.lax.bitcast_convert_type(x, jnp.uint32) >> (32 - bits)
    count = jnp.asarray(_bins(ascending, bits)[0])[key]
    return count + (x > jnp.asarray(np.append(ascending, np.float32(np.inf)))[count]).astype(jnp.int32)


def _bins(ascending: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """For each bin of floats with the same leading bits, the number of values below the bin, and in the bin."""
    first = np.arange(2**bits, dtype=np.uint32) << (32 - bits)
    ends = np.stack([first, first | (2 ** (32 - bits) - 1)]).view(np.float32)
    ends = np.where(np.isnan(ends), np.copysign(np.float32(np.inf), ends), ends)
    below = np.searchsorted(ascending, np.sort(ends, axis=0)).astype(np.int32)
    return below[0], below[1] - below[0]


Format = Uniform | Codebook | Float8
FORMATS: dict[str, Format] = {
    **{f"int{bits}": Uniform(bits) for bits in (2, 3, 4, 5, 6, 8)},
    **{f"uint{bits}": Uniform(bits, affine=True) for bits in (2, 3, 4, 5, 6, 8)},
    "nf4": Codebook(NF4),
    "fp4": Codebook(FP4),
    "mxfp4": Microscaled(E2M1),
    "fp8_e4m3": Float8("float8_e4m3fn"),
    "fp8_e5m2": Float8("float8_e5m2"),
    **{f"dynamic{bits}": Codebook(dynamic_code(bits, signed=True)) for bits in (4, 8)},
    **{f"udynamic{bits}": Codebook(dynamic_code(bits, signed=False)) for bits in (4, 8)},
}


def values_per_group(bits: int) -> int:
    """The number of codes in a group.

    >>> [values_per_group(bits) for bits in (2, 3, 4, 5, 6, 8)]
    [4, 8, 2, 8, 4, 1]
    """
    return 8 // math.gcd(8, bits)


def pack(codes: jax.Array, bits: int, axis: int) -> jax.Array:
    """Bytes that hold uint8 codes below 2**bits, packed along `axis` (negative)."""
    if bits == 8:
        return codes
    padding = -codes.shape[axis] % values_per_group(bits)
    if padding:
        codes = jnp.pad(codes, [(0, padding if d == codes.ndim + axis else 0) for d in range(codes.ndim)])
    return _regroup(codes, bits, 8, axis)


def unpack(packed: jax.Array, bits: int, axis: int, size: int) -> jax.Array:
    """The inverse of `pack`: the first `size` codes along `axis`."""
    if bits == 8:
        return packed
    return jax.lax.slice_in_dim(_regroup(packed, 8, bits, axis), 0, size, axis=packed.ndim + axis)


def _regroup(words: jax.Array, bits: int, new_bits: int, axis: int) -> jax.Array:
    """The same stream of bits along `axis` in words of `new_bits` bits, each word in a uint8."""
    dim = words.ndim + axis
    group = math.lcm(bits, new_bits)
    before = words.shape[:dim]
    size = words.shape[dim]
    after = words.shape[dim + 1 :]
    grouped = words.reshape(*before, size * bits // group, group // bits, *after)
    inputs = [jax.lax.index_in_dim(grouped, i, dim + 1, keepdims=False) for i in range(group // bits)]

    def word(end: int) -> jax.Array:
        """The word that ends before bit `end` of the group."""
        parts = []
        for i, x in enumerate(inputs):
            shift = end - bits * (i + 1)  # from the last bit of the input to the last bit of the word
            if -bits < shift < new_bits:
                parts.append(x if shift == 0 else x << shift if shift > 0 else x >> -shift)
        joined = reduce(operator.or_, parts)
        return joined if new_bits == 8 else joined & jnp.uint8(2**new_bits - 1)

    packed = jnp.stack([word(end) for end in range(new_bits, group + 1, new_bits)], axis=dim + 1)
    return packed.reshape(*before, size * bits // new_bits, *after)
