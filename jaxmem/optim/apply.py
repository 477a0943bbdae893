"""The one place where weights change."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxmem import kernels
from jaxmem.errors import UserError
from jaxmem.kernels.draws import scramble
from jaxmem.optim.in_turn import in_parts
from jaxmem.optim.piece import Piece
from jaxmem.quant import QTensor
from jaxmem.quant.precision import rounded
from jaxmem.sharding import Axes, per_device
from jaxmem.sharding.weights import is_quantized


def apply(
    params: Any,
    updates: Any,
    key: jax.Array | None = None,
    axes: Any = None,
    *,
    layer: jax.Array | None = None,
    piece: Piece | None = None,
    kernel: Literal["none", "triton"] = "none",
) -> Any:
    """The one place where weights change: added in float32, stored as they were; with a key rounded stochastically.

    Each leaf, and each layer of a leaf whose `axes` begin with `layer`, draws from a key of its own: a layer that is
    updated alone (`layer=i`: of every stack this one) is rounded as it would be among all, and so are entries of a
    table (`piece`). Weights in codes are decoded and encoded again one layer after the other, 8 M numbers at a time,
    each where it was. `kernel`: those in int8 in one pass over memory, on GPUs, with the same draws.
    """

    def add(path: Any, w: Any, u: jax.Array, axes: Axes | None) -> Any:
        own = None if key is None else leaf_key(key, path)
        if not is_quantized(w):
            return each_layer(_added, (w, u), own, axes, layer, piece)
        names: Axes = (None,) * w.ndim if axes is None else axes
        seeds = None if own is None else _seeds(own, w, names, layer, piece)
        names = names[len(names) - w.ndim :]
        if kernel == "triton" and w.format == "int8":
            return _in_one_pass(w, u, seeds, names)
        return in_parts(_encoded, w, (u, seeds), names)

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


def _encoded(w: QTensor, beside: tuple[jax.Array, jax.Array | None], *_: jax.Array) -> QTensor:
    u, seeds = beside
    return w.requantize(w.dequantize(jnp.float32) + u.astype(jnp.float32), seeds)


def _in_one_pass(w: QTensor, u: jax.Array, seeds: jax.Array | None, axes: Axes) -> QTensor:
    """By `kernels.int8_add`. On a mesh each device goes through its own part."""
    if seeds is None:
        raise UserError("optim.apply: kernel triton rounds stochastically; give a key, or kernel none")
    run = partial(kernels.int8_add, axis=w.axis, block_size=w.block_size, implementation="triton")
    try:
        codes, scale = per_device(run, (w.codes, w.scale, u, seeds), axes, w.shape)
    except ValueError as error:
        raise UserError(f"optimizer.kernel: {error}; use none") from error
    return dataclasses.replace(w, codes=codes, scale=scale)


def _seeds(key: jax.Array, w: QTensor, axes: Axes, layer: jax.Array | None, piece: Piece | None) -> jax.Array:
    """A word for each block, from its layer's key and its place in that layer's whole matrix."""
    sizes = list(w.scale.shape)
    places = [jnp.arange(size, dtype=jnp.uint32) for size in sizes]
    keys = key.reshape(1)
    if axes[:1] == ("layer",):
        layers = layer
        if layers is None:
            layers, _ = places.pop(0), sizes.pop(0)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.atleast_1d(layers))
    if piece is not None:  # blocks run within entries
        dim = axes.index("vocab")
        places[dim], sizes[dim] = piece.entries.astype(jnp.uint32), piece.shape[dim]
    place = jnp.zeros((), jnp.uint32)
    for own, size in zip(places, sizes, strict=True):
        place = place[..., None] * jnp.uint32(size) + own
    words = jax.vmap(jax.random.bits)(keys).reshape(-1, *[1] * len(sizes))
    return scramble(place ^ words).reshape(w.scale.shape)


def leaf_key(key: jax.Array, path: Any) -> jax.Array:
    """A leaf's own key, by its name."""
    return jax.random.fold_in(key, zlib.crc32(jax.tree_util.keystr(path).encode()))


def global_norm(tree: Any) -> jax.Array:
    """Length of all leaves as one vector, summed in float32."""
    return jnp.sqrt(sum(jnp.sum(jnp.square(x.astype(jnp.float32))) for x in jax.tree.leaves(tree)))
