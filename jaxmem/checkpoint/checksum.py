"""A checksum of an array's bits that does not depend on how the array is sharded.

It is computed on the device, so it also detects errors of the transfer from the device to the disk and back. It costs
one read of the array on the device, no temporary array, and eight bytes of result.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped, UInt32

Sums = tuple[UInt32[Array, ""], UInt32[Array, ""]]


def checksum(leaf: jax.Array) -> int:
    """The checksum of an array. Waits for the result, since simulated CPU devices deadlock with more than 32 running
    programs."""
    if leaf.sharding.memory_kind == "pinned_host":  # an offloaded array is copied to the device
        leaf = jax.device_put(leaf, leaf.sharding.with_memory_kind("device"))
    plain, weighted = (int(value.addressable_data(0)) for value in sum_bits(leaf))  # a scalar is replicated
    return plain | weighted << 32


@jax.jit
def sum_bits(x: Shaped[Array, "*shape"]) -> Sums:
    """Two sums modulo 2^32: of the bits of all elements as integers, and of these integers times an odd number that
    depends on the position of the element.

    Integer sums do not depend on their order, so they are the same on any mesh. One changed bit always changes
    both sums: an odd multiple of 2^k, k < 32, is not 0 modulo 2^32. Elements that swap positions change the second sum.
    Both sums are one reduction, which XLA fuses with its operand; on CPUs it would split a single sum into windows over
    a materialized array.
    """
    bits = _bits(x)
    place = jnp.zeros(bits.shape, jnp.uint32)
    for dim in range(bits.ndim):
        place = place * jnp.uint32(0x9E3779B1) + jax.lax.broadcasted_iota(jnp.uint32, bits.shape, dim)
    products = bits * (place * jnp.uint32(2) + jnp.uint32(1))
    zero = jnp.uint32(0)
    plain, weighted = jax.lax.reduce((bits, products), (zero, zero), _add, tuple(range(bits.ndim)))
    return plain, weighted


def _add(a: Sums, b: Sums) -> Sums:
    return a[0] + b[0], a[1] + b[1]


def _bits(x: Shaped[Array, "*shape"]) -> UInt32[Array, "*words"]:
    """64-bit elements become two words; types narrower than a byte are widened."""
    if x.dtype == jnp.bool_ or jnp.dtype(x.dtype).name in ("int2", "int4", "uint2", "uint4"):
        return x.astype(jnp.int32).astype(jnp.uint32)
    width = min(jnp.dtype(x.dtype).itemsize, 4)
    words = jax.lax.bitcast_convert_type(x, {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[width])
    return words.astype(jnp.uint32)
