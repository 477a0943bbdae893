"""Which memory an array lies in: the device's own, or its host's.

An array in host memory says so in its type, and nothing computes with it before it was brought: jax refuses. What N
layers keep, or weights that stay, B bytes each, costs B over the host's link each time that it goes one way. The device
holds 2 B of it: what is in use, and what was brought ahead of time. Where a layer computes longer than its bytes
travel, nobody waits (Ren et al., arXiv:2101.06840). On CPUs there is one memory, and nothing moves.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

HOST = "pinned_host"  # what jax calls it
PIECE = 2**24  # numbers


def to_host(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Host), tree)


def to_device(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Device), tree)


def is_away(x: Any) -> bool:
    """Whether an array lies in host memory."""
    return bool(jax.typeof(x).memory_space == jax.memory.Space.Host)


def brought(tree: Any) -> Any:
    """What lies on the host, on the device; the rest as it is."""
    return jax.tree.map(lambda x: to_device(x) if is_away(x) else x, tree)


def empty(shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
    """Zeros that were on the host from the beginning: written there piece by piece, never whole on the device."""
    counts = [n for n in range(1, shape[0] + 1) if shape[0] % n == 0]
    parts = next((n for n in counts if math.prod(shape) // n <= PIECE), shape[0])
    piece = (shape[0] // parts, *shape[1:])
    _, pieces = jax.lax.scan(lambda _, __: (None, to_host(jnp.zeros(piece, dtype))), None, length=parts)
    return pieces.reshape(shape)


def sent_as(tree: Any, before: Any) -> Any:
    """To the host what lay there before."""
    return jax.tree.map(lambda x, old: to_host(x) if is_away(old) else x, tree, before)


def away(tree: Any) -> Any:
    """What lies on the host, with None in the place of the rest."""
    return jax.tree.map(lambda x: x if is_away(x) else None, tree)


def here(tree: Any) -> Any:
    """And the rest."""
    return jax.tree.map(lambda x: None if is_away(x) else x, tree)


def layer_ahead(stacked: Any, layer: jax.Array) -> Any:
    """One layer of what lies on the host, on its way to the device. Past either end it is the last one there, which
    nobody reads."""

    def one(x: jax.Array) -> jax.Array:
        return to_device(jax.lax.dynamic_index_in_dim(x, jnp.clip(layer, 0, x.shape[0] - 1), keepdims=False))

    return jax.tree.map(one, away(stacked))


def filled(tree: Any, others: Any) -> Any:
    """What is `here` with what was brought in its places."""
    return jax.tree.map(lambda x, other: other if x is None else x, tree, others, is_leaf=lambda x: x is None)
