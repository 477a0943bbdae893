"""Adds updates to weights, with stochastic rounding and for quantized weights."""

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
from jaxmem.optim.in_place import update_rows
from jaxmem.optim.vocab_slice import VocabSlice
from jaxmem.quant import QTensor
from jaxmem.quant.precision import rounded
from jaxmem.sharding import Axes, per_device
from jaxmem.sharding.weights import is_quantized


def apply_updates(
    params: Any,
    updates: Any,
    key: jax.Array | None = None,
    axes: Any = None,
    *,
    layer: jax.Array | None = None,
    vocab_slice: VocabSlice | None = None,
    kernel: Literal["none", "triton"] = "none",
) -> Any:
    """Returns the new weights, computed in float32 and stored in their dtype. With a key they are rounded
    stochastically.

    Each leaf, and each layer of a leaf whose `axes` begin with `layer`, has its own key. So updating a single layer of
    every stack (`layer=i`), or some rows of a vocabulary matrix (`vocab_slice`), rounds in the same way as updating
    everything. Quantized weights are dequantized and quantized in place, layer by layer, at most 8 M elements at a
    time. `kernel` selects a fused update of int8 weights on GPUs, with the same random numbers.
    """

    def add(path: Any, w: Any, u: jax.Array, axes: Axes | None) -> Any:
        own = None if key is None else leaf_key(key, path)
        if not is_quantized(w):
            return map_layers(_added, (w, u), own, axes, layer, vocab_slice)
        names: Axes = (None,) * w.ndim if axes is None else axes
        seeds = None if own is None else _block_seeds(own, w, names, layer, vocab_slice)
        names = names[len(names) - w.ndim :]
        if kernel == "triton" and w.format == "int8":
            return _add_fused(w, u, seeds, names)
        return update_rows(_requantized, w, (u, seeds), names)

    axes = jax.tree.map(lambda _: None, params, is_leaf=is_quantized) if axes is None else axes
    return jax.tree_util.tree_map_with_path(add, params, updates, axes, is_leaf=is_quantized)


def map_layers(
    one: Callable[..., Any],
    arrays: tuple[Any, ...],
    key: jax.Array | None,
    axes: Axes | None,
    layer: jax.Array | None,
    vocab_slice: VocabSlice | None = None,
) -> Any:
    """Applies `one(*arrays, key)` to a leaf. Each layer of a stack and each row of a vocabulary matrix has its own key,
    also if it is updated separately (`layer`, `vocab_slice`)."""
    if key is None or axes is None:
        return one(*arrays, key)
    if (keys := row_keys(key, axes, arrays[0].shape, vocab_slice)) is not None:
        dim = axes.index("vocab")
        return jax.vmap(one, (dim,) * len(arrays) + (0,), dim)(*arrays, keys.reshape(-1))
    if axes[:1] != ("layer",):
        return one(*arrays, key)
    if layer is not None:
        return one(*arrays, jax.random.fold_in(key, layer))
    keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(jax.tree.leaves(arrays)[0].shape[0]))
    return jax.vmap(one)(*arrays, keys)


def _added(w: jax.Array, u: jax.Array, key: jax.Array | None) -> jax.Array:
    # Vectors of a model with quantized matrices are stored in float32 and not rounded.
    return rounded(w.astype(jnp.float32) + u.astype(jnp.float32), w.dtype, key)


def row_keys(key: jax.Array, axes: Axes, shape: tuple[int, ...], vocab_slice: VocabSlice | None) -> jax.Array | None:
    """A key for each row of a vocabulary matrix, [rows, 1] or [1, rows]; None for other weights."""
    if "vocab" not in axes or axes[:1] == ("layer",):
        return None
    dim = axes.index("vocab")
    rows = jnp.arange(shape[dim], dtype=jnp.int32) if vocab_slice is None else vocab_slice.rows
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, rows)
    return keys.reshape([-1 if d == dim else 1 for d in range(len(shape))])


def _requantized(w: QTensor, beside: tuple[jax.Array, jax.Array | None], *_: jax.Array) -> QTensor:
    u, seeds = beside
    return w.requantize(w.dequantize(jnp.float32) + u.astype(jnp.float32), seeds)


def _add_fused(w: QTensor, u: jax.Array, seeds: jax.Array | None, axes: Axes) -> QTensor:
    """Updates with `kernels.int8_add`. On a mesh each device updates its own shard."""
    if seeds is None:
        raise UserError(
            "optim.apply_updates: kernel=triton requires a key for stochastic rounding; pass one, or kernel=none"
        )
    run = partial(kernels.int8_add, axis=w.axis, block_size=w.block_size, implementation="triton")
    try:
        codes, scale = per_device(run, (w.codes, w.scale, u, seeds), axes, w.shape)
    except ValueError as error:
        raise UserError(f"optimizer.kernel=triton: {error}; use none") from error
    return dataclasses.replace(w, codes=codes, scale=scale)


def _block_seeds(
    key: jax.Array, w: QTensor, axes: Axes, layer: jax.Array | None, vocab_slice: VocabSlice | None
) -> jax.Array:
    """A random word for each block, from the key of its layer and its position in the complete matrix."""
    sizes = list(w.scale.shape)
    places = [jnp.arange(size, dtype=jnp.uint32) for size in sizes]
    keys = key.reshape(1)
    if axes[:1] == ("layer",):
        layers = layer
        if layers is None:
            layers, _ = places.pop(0), sizes.pop(0)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.atleast_1d(layers))
    if vocab_slice is not None:  # blocks run within rows
        dim = axes.index("vocab")
        places[dim], sizes[dim] = vocab_slice.rows.astype(jnp.uint32), vocab_slice.shape[dim]
    place = jnp.zeros((), jnp.uint32)
    for own, size in zip(places, sizes, strict=True):
        place = place[..., None] * jnp.uint32(size) + own
    words = jax.vmap(jax.random.bits)(keys).reshape(-1, *[1] * len(sizes))
    return scramble(place ^ words).reshape(w.scale.shape)


def leaf_key(key: jax.Array, path: Any) -> jax.Array:
    """The key of a leaf, derived from its name."""
    return jax.random.fold_in(key, zlib.crc32(jax.tree_util.keystr(path).encode()))


def global_norm(tree: Any) -> jax.Array:
    """Euclidean norm of all leaves as one vector, summed in float32."""
    return jnp.sqrt(sum(jnp.sum(jnp.square(x.astype(jnp.float32))) for x in jax.tree.leaves(tree)))
