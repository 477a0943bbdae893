"""Random numbers from positions alone: a counter in place of a state, so that any tiling draws the same ones."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, UInt32


def scramble(x: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """A bijection of 32-bit words in which each input bit flips each output bit half of the time.

    Constants: Hash prospector's "lowbias32" (https://github.com/skeeto/hash-prospector).
    """
    x = x ^ (x >> jnp.uint32(16))
    x = x * jnp.uint32(0x7FEB352D)
    x = x ^ (x >> jnp.uint32(15))
    x = x * jnp.uint32(0x846CA68B)
    return x ^ (x >> jnp.uint32(16))


def uniform(seed: UInt32[Array, "..."], place: Int32[Array, "..."]) -> Float[Array, "..."]:
    """In [0, 1), in steps of 2^-24, for each place; 2^32 places have numbers of their own."""
    word = scramble(scramble(place.astype(jnp.uint32) ^ seed) + seed)
    return (word >> jnp.uint32(8)).astype(jnp.int32).astype(jnp.float32) * (2.0**-24)
