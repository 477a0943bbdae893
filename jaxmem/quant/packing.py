"""Values of 2 to 6 bits, side by side in bytes along one dimension, the first in the highest bits.

As many values share a group of bytes as it takes to end on a byte: 4 values of 2 bits or 2 of 4 in one byte, 4 of
6 bits in three, 8 of 3 bits in three, 8 of 5 in five. No bit is lost but at the end of a length that no group divides.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp


def values_per_group(bits: int) -> int:
    """
    >>> [values_per_group(bits) for bits in (2, 3, 4, 5, 6, 8)]
    [4, 8, 2, 8, 4, 1]
    """
    return 8 // math.gcd(8, bits)


def packed_size(size: int, bits: int) -> int:
    """Bytes that `size` values take."""
    group = values_per_group(bits)
    return -(-size // group) * group * bits // 8


def pack(codes: jax.Array, bits: int, axis: int) -> jax.Array:
    """uint8 codes below 2**bits, several to a byte along `axis` (negative)."""
    if bits == 8:
        return codes
    group = values_per_group(bits)
    short = -codes.shape[axis] % group
    if short:
        codes = jnp.pad(codes, [(0, short if d == codes.ndim + axis else 0) for d in range(codes.ndim)])
    values = _members(codes, group, axis)
    made = []
    for byte in range(group * bits // 8):
        parts = []
        for place, value in enumerate(values):
            shift = 8 * (byte + 1) - bits * (place + 1)  # from the value's last bit to the byte's
            if -bits < shift < 8:
                parts.append(value << shift if shift >= 0 else value >> -shift)
        made.append(_either(parts))
    return _joined(made, axis)


def unpack(packed: jax.Array, bits: int, axis: int, size: int) -> jax.Array:
    """The `size` codes along `axis` that `pack` put together."""
    if bits == 8:
        return packed
    group = values_per_group(bits)
    held = _members(packed, group * bits // 8, axis)
    values = []
    for place in range(group):
        parts = []
        for byte, eight in enumerate(held):
            shift = 8 * (byte + 1) - bits * (place + 1)
            if -bits < shift < 8:
                parts.append(eight >> shift if shift >= 0 else eight << -shift)
        values.append(_either(parts) & jnp.uint8(2**bits - 1))
    return jax.lax.slice_in_dim(_joined(values, axis), 0, size, axis=packed.ndim + axis)


def _members(x: jax.Array, group: int, axis: int) -> list[jax.Array]:
    """Of each group of neighbours along `axis` the first, the second, ..."""
    dim = x.ndim + axis
    grouped = x.reshape(*x.shape[:dim], x.shape[dim] // group, group, *x.shape[dim + 1 :])
    return [jax.lax.index_in_dim(grouped, place, dim + 1, keepdims=False) for place in range(group)]


def _joined(parts: list[jax.Array], axis: int) -> jax.Array:
    """The inverse of `_members`."""
    dim = parts[0].ndim + axis
    whole = jnp.stack(parts, axis=dim + 1)
    return whole.reshape(*whole.shape[:dim], whole.shape[dim] * len(parts), *whole.shape[dim + 2 :])


def _either(parts: list[jax.Array]) -> jax.Array:
    found = parts[0]
    for part in parts[1:]:
        found = found | part
    return found
