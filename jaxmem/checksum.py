"""A checksum of an array's bits that is the same however the array is split over devices.

It is computed where the array is, so what it guards includes the way from the device to the disk and back. Cost:
one read of the array on the device, no temporary array, four bytes of result.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped, UInt32


def checksum(leaf: jax.Array) -> UInt32[Array, ""]:
    if leaf.sharding.memory_kind == "pinned_host":  # offloaded: one array at a time passes through the device
        leaf = jax.device_put(leaf, leaf.sharding.with_memory_kind("device"))
    return _sum_bits(leaf)


@jax.jit
def _sum_bits(x: Shaped[Array, "*shape"]) -> UInt32[Array, ""]:
    """The sum, modulo 2^32, of every element's bits times an odd number that depends on its place.

    Integer sums do not depend on their order, so the value is the same on any mesh. One changed bit always changes it:
    an odd multiple of 2^k, k < 32, is not 0 modulo 2^32.
    """
    bits = _bits(x)
    place = jnp.zeros(bits.shape, jnp.uint32)
    for dim in range(bits.ndim):
        place = place * jnp.uint32(0x9E3779B1) + jax.lax.broadcasted_iota(jnp.uint32, bits.shape, dim)
    return jnp.sum(bits * (place * jnp.uint32(2) + jnp.uint32(1)), dtype=jnp.uint32)


def _bits(x: Shaped[Array, "*shape"]) -> UInt32[Array, "*words"]:
    """64-bit elements become two words; what is narrower than a byte is widened, which loses nothing."""
    if x.dtype == jnp.bool_ or jnp.dtype(x.dtype).name in ("int2", "int4", "uint2", "uint4"):
        return x.astype(jnp.int32).astype(jnp.uint32)
    width = min(jnp.dtype(x.dtype).itemsize, 4)
    words = jax.lax.bitcast_convert_type(x, {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[width])
    return words.astype(jnp.uint32)
