"""Which blocks a program of the Mosaic kernels visits: those that its own block sees, and which of them unmasked."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .block import Call, MaskArrays


class BlockRange(NamedTuple):
    """Consecutive blocks, and whether a mask touches them."""

    start: Any
    stop: Any
    masked: bool


def loop_over(ranges: list[BlockRange], visit: Callable[..., Any], state: Any) -> Any:
    for start, stop, masked in ranges:
        state = jax.lax.fori_loop(start, stop, functools.partial(visit, masked=masked), state)
    return state


def key_ranges(call: Call, block: jax.Array, masks: MaskArrays) -> list[BlockRange]:
    """The blocks of keys in which this block of queries sees something."""
    o, size = call.options, call.blocks.keys
    first = block * call.blocks.queries
    last = first + call.blocks.queries - 1
    low: Any = jnp.int32(0)
    high: Any = jnp.int32(call.keys)
    whole_low: Any = jnp.int32(0)
    whole_high: Any = jnp.int32(call.keys)
    if o.causal or o.window is not None:
        high = jnp.clip(last + call.offset + 1, 0, call.keys)
        whole_high = jnp.clip(first + call.offset + 1, 0, call.keys)
    if o.window is not None:
        low = jnp.maximum(first + call.offset - o.window + 1, 0)
        whole_low = jnp.maximum(last + call.offset - o.window + 1, 0)
    edges = o.window is not None, o.causal or o.window is not None or call.keys % size > 0
    return _ranges(low, high, whole_low, whole_high, size, block, masks, edges)


def query_ranges(call: Call, block: jax.Array, masks: MaskArrays) -> list[BlockRange]:
    """The blocks of queries that see something of this block of keys."""
    o, size = call.options, call.blocks.queries
    first = block * call.blocks.keys
    last = first + call.blocks.keys - 1
    low: Any = jnp.int32(0)
    high: Any = jnp.int32(call.queries)
    whole_low: Any = jnp.int32(0)
    # A last block that is not full may be whole: its empty rows add nothing.
    whole_high: Any = jnp.int32(-(-call.queries // size) * size)
    if o.causal or o.window is not None:
        low = jnp.maximum(first - call.offset, 0)
        whole_low = jnp.maximum(last - call.offset, 0)
    if o.window is not None:
        high = jnp.clip(last - call.offset + o.window, 0, call.queries)
        whole_high = jnp.clip(first - call.offset + o.window, 0, call.queries)
    edges = o.causal or o.window is not None, o.window is not None
    return _ranges(low, high, whole_low, whole_high, size, block, masks, edges)


def _ranges(
    low: Any,
    high: Any,
    whole_low: Any,
    whole_high: Any,
    size: int,
    block: Any,
    masks: MaskArrays,
    edges: tuple[bool, bool],
) -> list[BlockRange]:
    """Blocks that hold positions low..high-1; those within whole_low..whole_high-1 need no mask. `block` is the one
    that this program holds. `edges`: whether there can be masked blocks before and after the whole ones."""
    begin, end = _div(low, size), _div(high + size - 1, size)
    if masks.begin is not None:
        begin = jnp.maximum(begin, masks.begin[block])
        end = jnp.minimum(end, masks.end[block])
        return [BlockRange(begin, end, True)]
    whole_begin = jnp.clip(_div(whole_low + size - 1, size), begin, jnp.maximum(begin, end))
    whole_end = jnp.clip(_div(whole_high, size), whole_begin, jnp.maximum(whole_begin, end))
    before, whole, after = (begin, whole_begin), (whole_begin, whole_end), (whole_end, end)
    first, last = [BlockRange(*before, True)] * edges[0], [BlockRange(*after, True)] * edges[1]
    return [*first, BlockRange(*whole, False), *last]


def _div(x: Any, size: int) -> jax.Array:
    return jax.lax.div(x, jnp.int32(size))
