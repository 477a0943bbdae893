"""Counter-based random numbers: they depend only on a seed and a position, so every tiling draws the same numbers."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, UInt32

# 2^32 divided by the golden ratio. Its multiples differ in all bits, so blocks with similar seeds have few words in
# common: at most 4 of the 128 words of 256 numbers.
_APART = 0x9E3779B9


def scramble(x: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """A bijection of 32-bit words in which each input bit flips each output bit half of the time.

    The numbers are those of Hash prospector's "lowbias32" (https://github.com/skeeto/hash-prospector).
    """
    x = x ^ (x >> jnp.uint32(16))
    x = x * jnp.uint32(0x7FEB352D)
    x = x ^ (x >> jnp.uint32(15))
    x = x * jnp.uint32(0x846CA68B)
    return x ^ (x >> jnp.uint32(16))


def uniform(seed: UInt32[Array, "..."], place: Int32[Array, "..."]) -> Float[Array, "..."]:
    """A uniform number in (0, 1) for each position: the centre of one of 2^16 equal intervals. Two neighbouring
    positions use the halves of one word. Stochastic rounding with these numbers has a bias of at most 2^-17."""
    pair = (place >> 1).astype(jnp.uint32)
    word = scramble(seed ^ (pair * jnp.uint32(_APART)))
    half = jnp.where(place & 1 == 1, word >> jnp.uint32(16), word & jnp.uint32(0xFFFF))
    # The 16 bits become the last bits of the mantissa of a float in [128, 129): 128 + n 2^-16.
    return jax.lax.bitcast_convert_type(half | jnp.uint32(0x43000000), jnp.float32) - (128 - 2.0**-17)
