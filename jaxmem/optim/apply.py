"""The one place where weights change."""

from __future__ import annotations

import zlib
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem.precision import rounded
from jaxmem.sharding import Axes


def apply(
    params: Any, updates: Any, key: jax.Array | None = None, axes: Any = None, *, layer: jax.Array | None = None
) -> Any:
    """The one place where weights change: added in float32, stored as they were; with a key rounded stochastically.

    Each leaf, and each layer of a leaf whose `axes` begin with `layer`, draws from a key of its own: a layer that is
    updated alone, as `layer` of its stack, is rounded as it would be among all.
    """

    def add(path: Any, w: jax.Array, u: jax.Array, axes: Axes | None) -> jax.Array:
        new = w.astype(jnp.float32) + u.astype(jnp.float32)
        if key is None:
            return new.astype(w.dtype)
        own = leaf_key(key, path)
        if axes is None or axes[:1] != ("layer",):
            return rounded(new, w.dtype, own)
        if layer is not None:
            return rounded(new, w.dtype, jax.random.fold_in(own, layer))
        keys = jax.vmap(lambda layer: jax.random.fold_in(own, layer))(jnp.arange(w.shape[0]))
        return jax.vmap(lambda x, k: rounded(x, w.dtype, k))(new, keys)

    axes = jax.tree.map(lambda _: None, params) if axes is None else axes
    return jax.tree_util.tree_map_with_path(add, params, updates, axes)


def leaf_key(key: jax.Array, path: Any) -> jax.Array:
    """A leaf's own key, by its name."""
    return jax.random.fold_in(key, zlib.crc32(jax.tree_util.keystr(path).encode()))


def global_norm(tree: Any) -> jax.Array:
    """Length of all leaves as one vector, summed in float32."""
    return jnp.sqrt(sum(jnp.sum(jnp.square(x.astype(jnp.float32))) for x in jax.tree.leaves(tree)))
