"""One block of queries against one of keys, as every program of the Pallas kernels reads, scores and writes it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from .arguments import Options
from .mask import kept, visible
from .shapes import pairs

LOG2E = math.log2(math.e)


class Blocks(NamedTuple):
    """How a kernel is cut: powers of two, at least 16 for the tensor cores."""

    queries: int
    keys: int
    warps: int
    stages: int


class Call(NamedTuple):
    """All that is known of a call when its kernels are compiled."""

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
        """(query, key) pairs that see each other, segments aside."""
        return pairs(self.queries, self.keys, causal=self.options.causal, window=self.options.window)

    @property
    def wide(self) -> int:
        """`dim` as a block holds it."""
        return pl.next_power_of_2(self.dim)

    @property
    def unit(self) -> float:
        """What a score of 1, as `bent` gives it, is in natural units."""
        o = self.options
        return o.soft_cap or (o.scale if _is_unit(o.scale) else 1.0)


class Beside(NamedTuple):
    """What a kernel reads beside q, k and v: arrays outside, references inside."""

    seed: Any = None
    ids: Any = None
    kv_ids: Any = None
    begin: Any = None  # of each of this kernel's blocks: the first block of the others that shares a segment with it
    end: Any = None


def turned_block() -> jax.Array:
    """The queries' block of this program: the last ones come first, since under `causal` they take the longest."""
    return pl.num_programs(0) - 1 - pl.program_id(0)


def dot(a: jax.Array, b: jax.Array, trans_b: bool = False) -> jax.Array:
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return plgpu.dot(a, b, trans_b=trans_b, precision=precision).astype(jnp.float32)


def bent(
    call: Call, raw: jax.Array, tanh: Callable[[jax.Array], jax.Array] = jnp.tanh
) -> tuple[jax.Array, jax.Array | None]:
    """Scores in `call.unit`, and what soft-capping makes of a change in them. Differences are taken before the unit is
    multiplied in: no more operations, and as exact for scores of 10,000 as for small ones."""
    o = call.options
    if o.soft_cap is None:
        return (raw if _is_unit(o.scale) else raw * o.scale), None
    capped = tanh(raw * (o.scale / o.soft_cap))
    return capped, 1.0 - capped * capped


def power(call: Call, difference: jax.Array) -> jax.Array:
    """exp of a difference of scores."""
    return jnp.exp2(difference * (call.unit * LOG2E))


def _is_unit(scale: float) -> bool:
    """Positive, so that the largest product is the largest score, and not so small that a quotient overflows."""
    return scale > 1e-6


def in_sight(
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


def kept_share(call: Call, seed: Any, row: jax.Array, query: jax.Array, key: jax.Array) -> jax.Array:
    """What dropout makes of each probability's weight: 0, or 1 / (1 - rate)."""
    rate = call.options.dropout
    words = (seed[0], seed[1])
    return jnp.where(kept(words, row, query, key, rate), 1.0 / (1.0 - rate), 0.0)


def row_number() -> jax.Array:
    """Batch and head of this program as one number."""
    return pl.program_id(2) * pl.num_programs(1) + pl.program_id(1)


def positions(first: jax.Array, count: int) -> jax.Array:
    return first + jnp.arange(count, dtype=jnp.int32)


def load(ref: Any, rows: Any, real: jax.Array, call: Call) -> jax.Array:
    columns = jnp.arange(call.wide, dtype=jnp.int32) < call.dim
    return plgpu.load(ref.at[*rows, :], mask=real[:, None] & columns[None, :], other=0.0)


def store(ref: Any, x: jax.Array, real: jax.Array, call: Call) -> None:
    columns = jnp.arange(call.wide, dtype=jnp.int32) < call.dim
    plgpu.store(ref, x.astype(ref.dtype), mask=real[:, None] & columns[None, :])


def load_row(ref: Any, first: Any, at: jax.Array, length: int, here: Any = None) -> jax.Array:
    here = pl.ds(first, at.shape[0]) if here is None else here
    return plgpu.load(ref.at[here], mask=at < length, other=-1)
