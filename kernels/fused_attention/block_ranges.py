"""The blocks that a program of the Mosaic kernels visits: those that are not masked completely for its own block."""

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


def visited_blocks(call: Call, block: jax.Array, masks: MaskArrays, *, by_keys: bool) -> list[BlockRange]:
    """The blocks of keys that are not masked completely for this block of queries; with `by_keys`, the blocks of
    queries that are not masked completely for this block of keys. Partly masked blocks are first, then unmasked ones,
    then partly masked ones again."""
    o, window = call.options, call.options.window
    back = None if window is None else window - 1
    causal = 0 if o.causal or window is not None else None
    # The positions `below` to `above` from a position, less `shift`, are those that have to do with it.
    if by_keys:
        own, size, length, shift = call.blocks.keys, call.blocks.queries, call.queries, -call.offset
        below, above = causal, back
    else:
        own, size, length, shift = call.blocks.queries, call.blocks.keys, call.keys, call.offset
        below, above = None if back is None else -back, causal
    first = block * own + shift
    last = first + own - 1
    low = whole_low = jnp.int32(0)
    high: Any = jnp.int32(length)
    # A last block of queries that is not full needs no mask: its empty rows add nothing.
    whole_high: Any = jnp.int32(-(-length // size) * size if by_keys else length)
    if below is not None:
        low, whole_low = jnp.maximum(first + below, 0), jnp.maximum(last + below, 0)
    if above is not None:
        high, whole_high = jnp.clip(last + above + 1, 0, length), jnp.clip(first + above + 1, 0, length)
    begin, end = _div(low, size), _div(high + size - 1, size)
    if masks.begin is not None:
        begin = jnp.maximum(begin, masks.begin[block])
        end = jnp.minimum(end, masks.end[block])
        return [BlockRange(begin, end, True)]
    whole_begin = jnp.clip(_div(whole_low + size - 1, size), begin, jnp.maximum(begin, end))
    whole_end = jnp.clip(_div(whole_high, size), whole_begin, jnp.maximum(whole_begin, end))
    has_last = above is not None or (not by_keys and length % size > 0)
    before, after = [BlockRange(begin, whole_begin, True)], [BlockRange(whole_end, end, True)]
    return [*before[: below is not None], BlockRange(whole_begin, whole_end, False), *after[:has_last]]


def _div(x: Any, size: int) -> jax.Array:
    return jax.lax.div(x, jnp.int32(size))
