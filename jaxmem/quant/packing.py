"""Codes of 2 to 6 bits packed into bytes along one dimension, the first code in the highest bits.

A group is the smallest number of codes that fills complete bytes: four 2-bit or two 4-bit codes fill one byte; four
6-bit or eight 3-bit codes, three bytes; eight 5-bit codes, five bytes. Bits are unused only if the length is not a
multiple of a group.
"""

import functools
import math
import operator

import jax
import jax.numpy as jnp


def values_per_group(bits: int) -> int:
    """The number of codes in a group.

    >>> [values_per_group(bits) for bits in (2, 3, 4, 5, 6, 8)]
    [4, 8, 2, 8, 4, 1]
    """
    return 8 // math.gcd(8, bits)


def pack(codes: jax.Array, bits: int, axis: int) -> jax.Array:
    """Bytes that hold uint8 codes below 2**bits, packed along `axis` (negative)."""
    if bits == 8:
        return codes
    padding = -codes.shape[axis] % values_per_group(bits)
    if padding:
        codes = jnp.pad(codes, [(0, padding if d == codes.ndim + axis else 0) for d in range(codes.ndim)])
    return _regroup(codes, bits, 8, axis)


def unpack(packed: jax.Array, bits: int, axis: int, size: int) -> jax.Array:
    """The inverse of `pack`: the first `size` codes along `axis`."""
    if bits == 8:
        return packed
    return jax.lax.slice_in_dim(_regroup(packed, 8, bits, axis), 0, size, axis=packed.ndim + axis)


def _regroup(words: jax.Array, bits: int, new_bits: int, axis: int) -> jax.Array:
    """The same stream of bits along `axis` in words of `new_bits` bits, each word in a uint8."""
    dim = words.ndim + axis
    group = math.lcm(bits, new_bits)
    before = words.shape[:dim]
    size = words.shape[dim]
    after = words.shape[dim + 1 :]
    grouped = words.reshape(*before, size * bits // group, group // bits, *after)
    inputs = [jax.lax.index_in_dim(grouped, i, dim + 1, keepdims=False) for i in range(group // bits)]

    def word(end: int) -> jax.Array:
        """The word that ends before bit `end` of the group."""
        parts = []
        for i, x in enumerate(inputs):
            shift = end - bits * (i + 1)  # from the last bit of the input to the last bit of the word
            if -bits < shift < new_bits:
                parts.append(x if shift == 0 else x << shift if shift > 0 else x >> -shift)
        joined = functools.reduce(operator.or_, parts)
        return joined if new_bits == 8 else joined & jnp.uint8(2**new_bits - 1)

    packed = jnp.stack([word(end) for end in range(new_bits, group + 1, new_bits)], axis=dim + 1)
    return packed.reshape(*before, size * bits // new_bits, *after)
