"""What the codes of a quantized array stand for.

A block of values is scaled into the format's range by one constant, its largest magnitude (by scale), or by two,
its least and its span (affine); each value then becomes the nearest of the values that the format has:

    int2 ... int8          evenly spaced, by scale; -1 to 1
    uint2 ... uint8        evenly spaced, affine: a block's least to its largest value
    nf4                    equally likely under a normal distribution (Dettmers et al., arXiv:2305.14314)
    fp4                    1 sign, 2 exponent, 1 mantissa bit, with a zero
    fp8_e4m3, fp8_e5m2     8-bit floats (Micikevicius et al., arXiv:2209.05433)
    dynamic8, udynamic8    a decade for each exponent, evenly divided within: signed; positive
    dynamic4, udynamic4    the same in 4 bits (8-bit optimizers: Dettmers et al., arXiv:2110.02861)

With a random number for each value a code is drawn between its two neighbours, so that the mean is the value:
stochastic rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from jaxmem.kernels.codes import FP4, NF4, dynamic_code

Values = Float[Array, "*shape"]  # in the format's range
Codes = Shaped[Array, "*shape"]
Draws = Float[Array, "*shape"] | None  # uniform in [0, 1); None rounds to the nearest


class Format(Protocol):
    """How values in a range become codes of so many bits, and back."""

    @property
    def bits(self) -> int: ...

    @property
    def affine(self) -> bool:
        """Whether a block's range is its own (its least to its largest value), not -1 to 1."""

    def encode(self, x: Values, draws: Draws) -> Codes: ...

    def decode(self, codes: Codes) -> Values: ...


@dataclass(frozen=True)
class Even:
    """Evenly spaced: signed over [-1, 1], or over [0, 1]."""

    bits: int
    affine: bool = False

    @property
    def steps(self) -> int:
        """From 0 to 1."""
        return 2**self.bits - 1 if self.affine else 2 ** (self.bits - 1) - 1

    def encode(self, x: Values, draws: Draws) -> Codes:
        scaled = x * self.steps
        whole = jnp.round(scaled) if draws is None else jnp.floor(scaled + draws)
        # A draw just below 1 may round up beyond the range.
        whole = jnp.clip(whole, 0 if self.affine else -self.steps, self.steps)
        if self.bits == 8:
            return whole.astype(jnp.uint8 if self.affine else jnp.int8)
        return (whole + (0 if self.affine else self.steps)).astype(jnp.uint8)

    def decode(self, codes: Codes) -> Values:
        offset = 0 if self.affine or self.bits == 8 else self.steps
        return (codes.astype(jnp.float32) - offset) / self.steps


@dataclass(frozen=True)
class Listed:
    """Any values, in a list; a code is a value's place in it. Encoding sorts it."""

    code: tuple[float, ...]
    affine: bool = False

    @property
    def bits(self) -> int:
        return (len(self.code) - 1).bit_length()

    @cached_property
    def _places(self) -> np.ndarray:
        """In the list, of each value in ascending order; of equal ones the first."""
        return np.unique(np.asarray(self.code, np.float32), return_index=True)[1].astype(np.uint8)

    @cached_property
    def _ascending(self) -> np.ndarray:
        return np.asarray(self.code, np.float32)[self._places]

    def encode(self, x: Values, draws: Draws) -> Codes:
        values = self._ascending
        if draws is None:
            nearest = _count_below(x, (values[1:] + values[:-1]) / 2)
        else:
            above = _count_below(x, values).clip(1, len(values) - 1)
            low, high = jnp.asarray(values)[above - 1], jnp.asarray(values)[above]
            nearest = jnp.where(x - low > draws * (high - low), above, above - 1)
        return jnp.asarray(self._places)[nearest]

    def decode(self, codes: Codes) -> Values:
        return jnp.asarray(self.code, jnp.float32)[codes]


@dataclass(frozen=True)
class Float8:
    """A float of 8 bits, its largest finite value scaled to 1."""

    dtype: str
    bits: int = 8
    affine: bool = False

    @cached_property
    def _most(self) -> float:
        return float(jnp.finfo(self.dtype).max)

    @cached_property
    def _values(self) -> Listed:
        every = np.arange(256, dtype=np.uint8).view(jnp.dtype(self.dtype)).astype(np.float32)
        return Listed(tuple(np.where(np.isfinite(every), every, 0.0).tolist()))

    def encode(self, x: Values, draws: Draws) -> Codes:
        scaled = x * self._most
        if draws is None:
            return scaled.astype(self.dtype)
        return jax.lax.bitcast_convert_type(self._values.encode(scaled, draws), jnp.dtype(self.dtype))

    def decode(self, codes: Codes) -> Values:
        return codes.astype(jnp.float32) / self._most


def _count_below(x: Values, ascending: np.ndarray) -> Int[Array, "*shape"]:
    """For each of x how many of the given values are less.

    Its sign, exponent and first bits say it but for at most one of them, which a comparison decides: two reads of
    small tables for any number of values, where a binary search takes one for each bit.
    """
    kept = next(bits for bits in range(15, 24) if int(_bins(ascending, bits)[1].max()) <= 1)
    key = jax.lax.bitcast_convert_type(x, jnp.uint32) >> (32 - kept)
    sure = jnp.asarray(_bins(ascending, kept)[0])[key]
    return sure + (x > jnp.asarray(np.append(ascending, np.float32(np.inf)))[sure]).astype(jnp.int32)


def _bins(ascending: np.ndarray, kept: int) -> tuple[np.ndarray, np.ndarray]:
    """Of all floats that share their first bits: how many values are less than each, and how many are between."""
    first = np.arange(2**kept, dtype=np.uint32) << (32 - kept)
    ends = np.stack([first, first | (2 ** (32 - kept) - 1)]).view(np.float32)
    ends = np.where(np.isnan(ends), np.copysign(np.float32(np.inf), ends), ends)
    below = np.searchsorted(ascending, np.sort(ends, axis=0)).astype(np.int32)
    return below[0], below[1] - below[0]


FORMATS: dict[str, Format] = {
    **{f"int{bits}": Even(bits) for bits in (2, 3, 4, 5, 6, 8)},
    **{f"uint{bits}": Even(bits, affine=True) for bits in (2, 3, 4, 5, 6, 8)},
    "nf4": Listed(NF4),
    "fp4": Listed(FP4),
    "fp8_e4m3": Float8("float8_e4m3fn"),
    "fp8_e5m2": Float8("float8_e5m2"),
    **{f"dynamic{bits}": Listed(dynamic_code(bits, signed=True)) for bits in (4, 8)},
    **{f"udynamic{bits}": Listed(dynamic_code(bits, signed=False)) for bits in (4, 8)},
}
