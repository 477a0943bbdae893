"""The one place where weights change."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem.optim.in_turn import in_parts
from jaxmem.optim.piece import Piece
from jaxmem.precision import rounded
from jaxmem.quant import QTensor
from jaxmem.sharding import Axes
from jaxmem.weights import is_quantized


def apply(
    params: Any,
    updates: Any,
    key: jax.Array | None = None,
    axes: Any = None,
    *,
    layer: jax.Array | None = None,
    piece: Piece | None = None,
) -> Any:
    """The one place where weights change: added in float32, stored as they were; with a key rounded stochastically.

    Each leaf, and each layer of a leaf whose `axes` begin with `layer`, draws from a key of its own: a layer that is
    updated alone (`layer=i`: of every stack this one) is rounded as it would be among all, and so are entries of a
    table (`piece`). Weights in codes are decoded and encoded again one layer after the other, 8 M numbers at a time,
    each where it was.
    """

    def add(path: Any, w: Any, u: jax.Array, axes: Axes | None) -> Any:
        own = None if key is None else leaf_key(key, path)
        if not is_quantized(w):
            return each_layer(_added, (w, u), own, axes, layer, piece)
        if layer is None and axes is not None and axes[:1] == ("layer",):
            return _encoded(w, u, own, stacked=True)
        if own is not None and axes is not None and (keys := entry_keys(own, axes, w.shape, piece)) is not None:
            return _encoded(w, u, keys)
        return each_layer(_encoded, (w, u), own, axes, layer)

    axes = jax.tree.map(lambda _: None, params, is_leaf=is_quantized) if axes is None else axes
    return jax.tree_util.tree_map_with_path(add, params, updates, axes, is_leaf=is_quantized)


def each_layer(
    one: Callable[..., Any],
    arrays: tuple[Any, ...],
    key: jax.Array | None,
    axes: Axes | None,
    layer: jax.Array | None,
    piece: Piece | None = None,
) -> Any:
    """`one(*arrays, key)` of a leaf. Of a stack each layer has its own key, also where it comes alone as `layer`; of a
    table each entry."""
    if key is None or axes is None:
        return one(*arrays, key)
    if (keys := entry_keys(key, axes, arrays[0].shape, piece)) is not None:
        dim = axes.index("vocab")
        return jax.vmap(one, (dim,) * len(arrays) + (0,), dim)(*arrays, keys.reshape(-1))
    if axes[:1] != ("layer",):
        return one(*arrays, key)
    if layer is not None:
        return one(*arrays, jax.random.fold_in(key, layer))
    keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(jax.tree.leaves(arrays)[0].shape[0]))
    return jax.vmap(one)(*arrays, keys)


def _added(w: jax.Array, u: jax.Array, key: jax.Array | None) -> jax.Array:
    # A vector among weights in codes is kept in float32, where nothing is lost.
    return rounded(w.astype(jnp.float32) + u.astype(jnp.float32), w.dtype, key)


def entry_keys(key: jax.Array, axes: Axes, shape: tuple[int, ...], piece: Piece | None) -> jax.Array | None:
    """For each entry of a table a key of its own, [entries, 1] or [1, entries]; None: the weight is no table."""
    if "vocab" not in axes or axes[:1] == ("layer",):
        return None
    dim = axes.index("vocab")
    entries = jnp.arange(shape[dim], dtype=jnp.int32) if piece is None else piece.entries
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, entries)
    return keys.reshape([-1 if d == dim else 1 for d in range(len(shape))])


def _encoded(w: QTensor, u: jax.Array, keys: jax.Array | None, *, stacked: bool = False) -> QTensor:
    """`keys`: one, of which layers and parts make theirs, or one for each entry of a table."""
    rows = keys is not None and keys.shape[:1] == w.shape[:1]  # which are then parted with them

    def one(w: QTensor, beside: tuple[jax.Array, jax.Array | None], layer: jax.Array, number: jax.Array) -> QTensor:
        u, own = beside
        own = jax.random.wrap_key_data(own) if own is not None else keys
        if own is not None:
            own = _folded(jax.random.fold_in(own, layer) if stacked else own, number)
        return w.renewed(w.dequantize(jnp.float32) + u.astype(jnp.float32), own)

    beside = u, jax.random.key_data(keys) if keys is not None and rows else None
    return in_parts(one, w, beside, stacked=stacked)


def _folded(keys: jax.Array, i: jax.Array) -> jax.Array:
    one = jax.vmap(lambda key: jax.random.fold_in(key, i))
    return one(keys.reshape(-1)).reshape(keys.shape)


def leaf_key(key: jax.Array, path: Any) -> jax.Array:
    """A leaf's own key, by its name."""
    return jax.random.fold_in(key, zlib.crc32(jax.tree_util.keystr(path).encode()))


def global_norm(tree: Any) -> jax.Array:
    """Length of all leaves as one vector, summed in float32."""
    return jnp.sqrt(sum(jnp.sum(jnp.square(x.astype(jnp.float32))) for x in jax.tree.leaves(tree)))
