"""Properties of a call for the Triton and Mosaic kernels, and the scores of a block of queries and a block of keys."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxmem.kernels.launch import next_power_of_2

from .arguments import Options
from .mask import visible
from .shapes import pairs

LOG2E = math.log2(math.e)


class Blocks(NamedTuple):
    """Sizes of a kernel's blocks: powers of two, at least 16 for the tensor cores."""

    queries: int
    keys: int
    warps: int
    stages: int


class Call(NamedTuple):
    """Properties of a call that are known at compile time."""

    options: Options
    queries: int
    keys: int
    dim: int
    blocks: Blocks

    @property
    def offset(self) -> int:
        return self.keys - self.queries

    @property
    def pairs(self) -> int:
        """The number of (query, key) pairs that are not masked, without regard to segments."""
        return pairs(self.queries, self.keys, causal=self.options.causal, window=self.options.window)

    @property
    def wide(self) -> int:
        """`dim`, padded to the width of a block."""
        return next_power_of_2(self.dim)

    @property
    def unit(self) -> float:
        """The factor from the scores that `capped_scores` returns to natural units."""
        o = self.options
        return o.soft_cap or (o.scale if _is_unit(o.scale) else 1.0)


class MaskArrays(NamedTuple):
    """Inputs of a kernel besides q, k and v: arrays outside of the kernel, references inside."""

    seed: Any = None
    ids: Any = None
    kv_ids: Any = None
    begin: Any = None  # of each of this kernel's blocks: the first block of the others that shares a segment with it
    end: Any = None


def capped_scores(
    call: Call, raw: jax.Array, tanh: Callable[[jax.Array], jax.Array] = jnp.tanh
) -> tuple[jax.Array, jax.Array | None]:
    """Scores in `call.unit`, and the derivative of soft-capping. Differences of scores are computed before they are
    multiplied by the unit: this needs no more operations, and is as exact for scores of 10,000 as for small ones."""
    o = call.options
    if o.soft_cap is None:
        return (raw if _is_unit(o.scale) else raw * o.scale), None
    capped = tanh(raw * (o.scale / o.soft_cap))
    return capped, 1.0 - capped * capped


def _is_unit(scale: float) -> bool:
    """Whether a scale can be the unit: positive, so that the largest dot product has the largest score, and not so
    small that a quotient overflows."""
    return scale > 1e-6


def seen_in_block(
    call: Call, query: jax.Array, key: jax.Array, mine: Any, theirs: Any, dims: tuple[int, int] | None = None
) -> jax.Array:
    """`dims`: which ones of the scores the ids lack, if they lack any."""
    seen = key < call.keys
    near = visible(query, key, offset=call.offset, causal=call.options.causal, window=call.options.window)
    if near is not None:
        seen &= near
    if mine is not None:
        if dims is not None:
            mine, theirs = jnp.expand_dims(mine, dims[0]), jnp.expand_dims(theirs, dims[1])
        seen &= mine == theirs
    return seen
