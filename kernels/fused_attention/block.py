"""Properties of a call of the Triton and Mosaic kernels, the scores of a tile, and the blocks that a program visits."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxmem.kernels.launch import next_power_of_2

from .arguments import Options, visible
from .shapes import pairs

LOG2E = math.log2(math.e)


class Blocks(NamedTuple):
    """Block sizes of a kernel: powers of two, at least 16 for the tensor cores."""

    queries: int
    keys: int
    warps: int
    stages: int


class Call(NamedTuple):
    """Compile-time properties of a call."""

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
        """The number of (query, key) pairs that are not masked; segments are ignored."""
        return pairs(self.queries, self.keys, causal=self.options.causal, window=self.options.window)

    @property
    def wide(self) -> int:
        """`dim`, rounded up to a power of two."""
        return next_power_of_2(self.dim)

    @property
    def unit(self) -> float:
        """The unit of the scores that `capped_scores` returns."""
        o = self.options
        return o.soft_cap or (o.scale if _is_unit(o.scale) else 1.0)


class MaskArrays(NamedTuple):
    """Inputs of a kernel besides q, k and v: arrays outside of the kernel, references inside."""

    ids: Any = None
    kv_ids: Any = None
    begin: Any = None  # for each block of the kernel, the first block to visit that shares a segment with it
    end: Any = None  # for each block of the kernel, the end of the blocks to visit


def capped_scores(
    call: Call, raw: jax.Array, tanh: Callable[[jax.Array], jax.Array] = jnp.tanh
) -> tuple[jax.Array, jax.Array | None]:
    """Scores in units of `call.unit`, and the derivative of soft-capping. Differences of scores are computed before
    they are multiplied by the unit, so they are as exact for scores of 10,000 as for small scores."""
    o = call.options
    if o.soft_cap is None:
        return (raw if _is_unit(o.scale) else raw * o.scale), None
    capped = tanh(raw * (o.scale / o.soft_cap))
    return capped, 1.0 - capped * capped


def _is_unit(scale: float) -> bool:
    """Whether the scale can be the unit. It must be positive, so that the largest dot product has the largest score,
    and large enough that quotients do not overflow."""
    return scale > 1e-6


def seen_in_block(
    call: Call, query: jax.Array, key: jax.Array, mine: Any, theirs: Any, dims: tuple[int, int] | None = None
) -> jax.Array:
    """Whether each query of a tile attends to each key. `dims`: dimensions to add to the ids of queries and keys."""
    seen = key < call.keys
    near = visible(query, key, offset=call.offset, causal=call.options.causal, window=call.options.window)
    if near is not None:
        seen &= near
    if mine is not None:
        if dims is not None:
            mine, theirs = jnp.expand_dims(mine, dims[0]), jnp.expand_dims(theirs, dims[1])
        seen &= mine == theirs
    return seen


# ---------------------------------------------------------------- the blocks that a program visits (Mosaic)


class BlockRange(NamedTuple):
    """Consecutive blocks, and whether some of their elements are masked."""

    start: Any
    stop: Any
    masked: bool


def loop_over(ranges: list[BlockRange], visit: Callable[..., Any], state: Any) -> Any:
    for start, stop, masked in ranges:
        state = jax.lax.fori_loop(start, stop, functools.partial(visit, masked=masked), state)
    return state


def visited_blocks(call: Call, block: jax.Array, masks: MaskArrays, *, by_keys: bool) -> list[BlockRange]:
    """The blocks of keys that are not completely masked for this block of queries; with `by_keys`, the blocks of
    queries for this block of keys. Three ranges: partly masked blocks, unmasked blocks, partly masked blocks."""
    o, window = call.options, call.options.window
    back = None if window is None else window - 1
    causal = 0 if o.causal or window is not None else None
    # A position p of this block is visible from (or sees) the positions p + shift + below to p + shift + above.
    if by_keys:
        own, size, length, shift = call.blocks.keys, call.blocks.queries, call.queries, -call.offset
        below, above = causal, back
    else:
        own, size, length, shift = call.blocks.queries, call.blocks.keys, call.keys, call.offset
        below, above = None if back is None else -back, causal
    first = block * own + shift
    last = first + own - 1
    low = unmasked_low = jnp.int32(0)
    high: Any = jnp.int32(length)
    # Rows beyond the end of the last block of queries add zero, so this block needs no mask.
    unmasked_high: Any = jnp.int32(-(-length // size) * size if by_keys else length)
    if below is not None:
        low, unmasked_low = jnp.maximum(first + below, 0), jnp.maximum(last + below, 0)
    if above is not None:
        high, unmasked_high = jnp.clip(last + above + 1, 0, length), jnp.clip(first + above + 1, 0, length)
    begin, end = _div(low, size), _div(high + size - 1, size)
    if masks.begin is not None:
        begin = jnp.maximum(begin, masks.begin[block])
        end = jnp.minimum(end, masks.end[block])
        return [BlockRange(begin, end, True)]
    unmasked_begin = jnp.clip(_div(unmasked_low + size - 1, size), begin, jnp.maximum(begin, end))
    unmasked_end = jnp.clip(_div(unmasked_high, size), unmasked_begin, jnp.maximum(unmasked_begin, end))
    has_last = above is not None or (not by_keys and length % size > 0)
    before, after = [BlockRange(begin, unmasked_begin, True)], [BlockRange(unmasked_end, end, True)]
    return [*before[: below is not None], BlockRange(unmasked_begin, unmasked_end, False), *after[:has_last]]


def _div(x: Any, size: int) -> jax.Array:
    return jax.lax.div(x, jnp.int32(size))
