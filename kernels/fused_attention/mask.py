"""The masks of attention and of dropout, as functions of positions only: every implementation, tiling and backward pass
computes the same bits, and none is stored."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32, UInt32

from jaxmem.kernels.draws import scramble


def visible(
    query: Int32[Array, " *rows"],
    key: Int32[Array, " *keys"],
    *,
    offset: int,
    causal: bool,
    window: int | None,
) -> Bool[Array, "..."] | None:
    """Whether the query at position `query` attends to the key at position `key` (they broadcast); None: always. Query
    q is at key position q + `offset`, with `offset` = keys - queries. With a window of w it attends to the w keys that
    end at this position."""
    if not causal and window is None:
        return None
    distance = query + jnp.int32(offset) - key
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)


def keep_mask(
    seed: UInt32[Array, "2"] | tuple[UInt32[Array, ""], UInt32[Array, ""]],
    batch_and_head: Int32[Array, "..."],
    query: Int32[Array, "..."],
    key: Int32[Array, "..."],
    rate: float,
) -> Bool[Array, "..."]:
    """Whether dropout keeps the probability at these positions (they broadcast). The generator is counter-based: two
    scrambled words per row, and one more round, of about ten integer operations, per element."""
    return keep_from_words(*row_words(seed, batch_and_head, query), key, rate)


def row_words(seed: Any, batch_and_head: Int32[Array, "..."], query: Int32[Array, "..."]) -> tuple[Any, Any]:
    row = batch_and_head.astype(jnp.uint32)
    first = scramble(scramble(row ^ seed[0]) + query.astype(jnp.uint32) * jnp.uint32(0x9E3779B9))
    return first, scramble(first ^ seed[1])


def keep_from_words(first: Any, second: Any, key: Int32[Array, "..."], rate: float) -> Bool[Array, "..."]:
    """`keep_mask`, from the `row_words` of each row."""
    word = scramble((key.astype(jnp.uint32) ^ first) * jnp.uint32(0x85EBCA6B) + second)
    # A share `rate` of the 2**32 words is below the threshold: these are dropped.
    return word >= jnp.uint32(min(round(rate * 2**32), 2**32 - 1))


def seed_words(key: jax.Array) -> UInt32[Array, "2"]:
    """Two words from a jax random key of any kind."""
    return jax.random.bits(key, (2,), jnp.uint32)
