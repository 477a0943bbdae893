"""Which blocks a program of the Pallas kernels visits: those that its own block can see, and which of them whole."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from .block import Beside, Call


def over_keys(call: Call, block: jax.Array, beside: Beside, visit: Callable[..., Any], state: Any) -> Any:
    """`visit` each block of keys in which this block of queries sees something."""
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
    return _over(low, high, whole_low, whole_high, size, block, beside, visit, state)


def over_queries(call: Call, block: jax.Array, beside: Beside, visit: Callable[..., Any], state: Any) -> Any:
    """`visit` each block of queries that see something of this block of keys."""
    o, size = call.options, call.blocks.queries
    first = block * call.blocks.keys
    last = first + call.blocks.keys - 1
    low: Any = jnp.int32(0)
    high: Any = jnp.int32(call.queries)
    whole_low: Any = jnp.int32(0)
    # A last block that is not full may be whole: its empty rows add nothing.
    whole_high: Any = jnp.int32(pl.cdiv(call.queries, size) * size)
    if o.causal or o.window is not None:
        low = jnp.maximum(first - call.offset, 0)
        whole_low = jnp.maximum(last - call.offset, 0)
    if o.window is not None:
        high = jnp.clip(last - call.offset + o.window, 0, call.queries)
        whole_high = jnp.clip(first - call.offset + o.window, 0, call.queries)
    return _over(low, high, whole_low, whole_high, size, block, beside, visit, state)


def _over(
    low: Any, high: Any, whole_low: Any, whole_high: Any, size: int, block: Any, beside: Beside, visit: Any, state: Any
) -> Any:
    """Blocks that hold positions low..high-1; those within whole_low..whole_high-1 need no mask. `block` is the one
    that this program holds."""
    begin, end = _div(low, size), _div(high + size - 1, size)
    if beside.begin is not None:
        begin = jnp.maximum(begin, beside.begin[block])
        end = jnp.minimum(end, beside.end[block])
        return jax.lax.fori_loop(begin, end, functools.partial(visit, masked=True), state)
    whole_begin = jnp.clip(_div(whole_low + size - 1, size), begin, jnp.maximum(begin, end))
    whole_end = jnp.clip(_div(whole_high, size), whole_begin, jnp.maximum(whole_begin, end))
    for start, stop, masked in (
        (begin, whole_begin, True),
        (whole_begin, whole_end, False),
        (whole_end, end, True),
    ):
        state = jax.lax.fori_loop(start, stop, functools.partial(visit, masked=masked), state)
    return state


def _div(x: Any, size: int) -> jax.Array:
    return jax.lax.div(x, jnp.int32(size))
