"""Arrays in device memory or in host memory.

The memory of an array is part of its jax type, and jax refuses to compute with an array in host memory before it is
copied to the device. For layers of B bytes in host memory, B bytes per layer and direction are sent over the host link,
and a device stores 2 B: the current layer and the next one. The copy is overlapped if it takes less time than the
computation of a layer (Ren et al., arXiv:2101.06840). CPUs have only one memory, so nothing is copied.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.typing import DTypeLike

from jaxmem.typing import Tree

HOST_MEMORY = "pinned_host"  # jax's name of the memory
CHUNK_ELEMENTS = 2**24  # elements that are written at a time


def to_host(tree: Tree) -> Tree:
    return jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Host), tree)


def to_device(tree: Tree) -> Tree:
    return jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Device), tree)


def is_on_host(x: object) -> bool:
    """Whether an array has to be copied to the device."""
    return bool(jax.typeof(x).memory_space == jax.memory.Space.Host)


def fetch_from_host(tree: Tree) -> Tree:
    """A tree with all leaves on the device."""
    return jax.tree.map(lambda x: to_device(x) if is_on_host(x) else x, tree)


def send_like(tree: Tree, like: Tree) -> Tree:
    """The tree, with those leaves in host memory that are in host memory in `like`."""
    return jax.tree.map(lambda x, old: to_host(x) if is_on_host(old) else x, tree, like)


def zeros_on_host(shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
    """Zeros in host memory, written in chunks, so that the device never stores all of them."""
    counts = [n for n in range(1, shape[0] + 1) if shape[0] % n == 0]
    parts = next((n for n in counts if math.prod(shape) // n <= CHUNK_ELEMENTS), shape[0])
    chunk = (shape[0] // parts, *shape[1:])
    _, chunks = jax.lax.scan(lambda _, __: (None, to_host(jnp.zeros(chunk, dtype))), None, length=parts)
    return chunks.reshape(shape)


def host_leaves(tree: Tree) -> Tree:
    """The leaves in host memory; None for others."""
    return jax.tree.map(lambda x: x if is_on_host(x) else None, tree)


def device_leaves(tree: Tree) -> Tree:
    """The leaves on the device; None for others."""
    return jax.tree.map(lambda x: None if is_on_host(x) else x, tree)


def take_layer(stacked: Tree, layer: jax.Array, dim: int = 0) -> Tree:
    """One layer of stacked arrays; `dim` is the dimension of layers."""
    return jax.tree.map(lambda x: _read(dim)(x, layer), stacked)


def put_layer(stacked: Tree, layer: jax.Array, new: Tree) -> Tree:
    """Stacked arrays with one layer replaced."""
    return jax.tree.map(lambda x, new: _write(0)(x, new, layer), stacked, new)


# `jax.vmap` turns these into gathers and scatters with indices in device memory, which jax refuses for arrays in host
# memory. Slices along the next dimension are equivalent.
@functools.cache
def _read(dim: int) -> Any:
    @custom_vmap
    def read(x: jax.Array, i: jax.Array) -> jax.Array:
        return jax.lax.dynamic_index_in_dim(x, i, dim, keepdims=False)

    @read.def_vmap
    def _(_: int, batched: list[bool], x: jax.Array, i: jax.Array) -> tuple[jax.Array, bool]:
        return _read(dim + batched[0])(x, i), batched[0]

    return lambda x, i: read(x, i) if is_on_host(x) else jax.lax.dynamic_index_in_dim(x, i, dim, keepdims=False)


@functools.cache
def _write(dim: int) -> Any:
    @custom_vmap
    def write(x: jax.Array, new: jax.Array, i: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(x, new, i, dim)

    @write.def_vmap
    def _(size: int, batched: list[bool], x: jax.Array, new: jax.Array, i: jax.Array) -> tuple[jax.Array, bool]:
        x, new = (
            a if is_batched else jnp.broadcast_to(a, (size, *a.shape))
            for a, is_batched in zip((x, new), batched, strict=False)
        )
        return _write(dim + 1)(x, new, i), True

    return lambda x, new, i: write(x, new, i) if is_on_host(x) else jax.lax.dynamic_update_index_in_dim(x, new, i, dim)
