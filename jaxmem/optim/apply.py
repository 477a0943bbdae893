"""Adds updates to weights. Supports stochastic rounding, quantized weights, and updates of some rows of a matrix.

An optimizer that is written for a complete matrix can update an embedding or output matrix in slices. A rule that sums
over the complete matrix (a norm, a mean of each column) calls `UpdateContext.sums`. With slices, each such call needs
one pass over all slices, which computes the sums. A last pass applies the update. Every pass traces the same rule, and
XLA removes the computations after the first unknown sum.
"""

import dataclasses
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
from jax.tree_util import KeyPath
from jax.typing import DTypeLike
from jaxtyping import Array, Int, Shaped

from jaxmem import kernels
from jaxmem.errors import UserError, nearest
from jaxmem.kernels.draws import scramble
from jaxmem.kernels.scopes import purpose
from jaxmem.optim.in_place import update_rows
from jaxmem.quant import QTensor
from jaxmem.quant.precision import rounded, rounded_with
from jaxmem.sharding.leaves import per_device
from jaxmem.sharding.table import Axes, is_axes, is_stacked, path_name
from jaxmem.sharding.weights import is_encoded
from jaxmem.typing import AxesTree, Tree

SumOverSlices = Callable[[Any], Any]  # the contribution of one slice to a sum -> the sum over all slices


class NotSeparableError(Exception):
    """Raised if a rule needs the complete matrix and cannot be computed from sums over slices."""


@dataclass
class SlicedSums:
    """The sums over a matrix that are known so far, and the contributions of the current rows to all sums."""

    known: list[Any]
    shares: list[Any] = field(default_factory=list, init=False)

    def __call__(self, share: Tree) -> Any:
        self.shares.append(share)
        number = len(self.shares) - 1
        return self.known[number] if number < len(self.known) else share  # later sums are traced but not computed


@dataclass(frozen=True)
class VocabSlice:
    """Rows of a vocabulary matrix that are updated separately."""

    shape: tuple[int, ...]  # the shape of the complete matrix
    dim: int  # the vocabulary dimension
    rows: Int[Array, " rows"]  # the indices of the rows
    total: SumOverSlices


class Writer(Protocol):
    """`apply_updates` with a key and a kernel."""

    def __call__(
        self,
        params: Tree,
        updates: Tree,
        *,
        axes: AxesTree,
        layer: jax.Array | None = None,
        vocab_slice: VocabSlice | None = None,
    ) -> Tree: ...


def sliced_sums(update: Callable[[jax.Array, SumOverSlices], Any], count: int) -> list[Any] | None:
    """All sums over `count` slices that `update(index of the slice, total)` needs. Returns None if the rule needs the
    complete matrix."""
    first = jnp.zeros((), jnp.int32)

    def share(j: jax.Array) -> Tree:
        """The contribution of slice j to the first unknown sum."""
        sums = SlicedSums(known)
        update(j, sums)
        return sums.shares[len(known)]

    known: list[Any] = []
    needed = SlicedSums([])
    try:
        jax.eval_shape(lambda: update(first, needed))
    except NotSeparableError:
        return None
    for _ in needed.shares:
        # Each iteration needs a new function: for the same one jax would return the shapes of the previous sum.
        zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(lambda: share(first)))
        add = lambda j, sums: jax.tree.map(jnp.add, sums, share(j))  # noqa: E731
        known = [*known, jax.lax.fori_loop(0, count, add, zeros)]
    return known


@purpose("update")
def apply_updates(
    params: Tree,
    updates: Tree,
    key: jax.Array | None = None,
    axes: AxesTree = None,
    *,
    layer: jax.Array | None = None,
    vocab_slice: VocabSlice | None = None,
    kernel: Literal["auto", "none", "triton"] = "none",
) -> Tree:
    """Returns the new weights, computed in float32 and stored in their dtype.

    Each leaf, and each layer of a leaf whose axes begin with `layer`, has its own random key. So a weight is rounded in
    the same way if only a layer of every stack or some rows of a vocabulary matrix are updated. Quantized weights are
    dequantized and quantized in place, layer by layer, at most 8 M elements at a time.

    Args:
        params: the weights.
        updates: what is added to them.
        key: a random key for stochastic rounding; None: to the nearest value.
        axes: the logical axes of each weight; None: no weight is a stack.
        layer: the layer of every stack that is updated; None: all.
        vocab_slice: the rows of a vocabulary matrix that are updated; None: all.
        kernel: `triton` selects a fused update of int8 weights on GPUs, which uses the same random numbers; `auto` uses
            it only for weights whose blocks are all complete.
    """

    def add(path: KeyPath, w: Any, u: jax.Array, names: Axes) -> Tree:
        leaf_seed = None if key is None else leaf_key(key, path)
        if not is_encoded(w):
            return map_with_keys(_add, w, u, leaf_seed, names, layer, vocab_slice)
        seeds = None if leaf_seed is None else _block_seeds(leaf_seed, w, names, layer, vocab_slice)
        names = names[len(names) - w.ndim :]
        is_even = w.shape[w.axis] % w.block_size == 0
        if w.format == "int8" and (kernel == "triton" or (kernel == "auto" and is_even)):
            return _add_fused(w, u, seeds, names)
        return update_rows(_requantize, w, (u, seeds), names)

    axes = axes_or_unnamed(axes, params)
    return jax.tree_util.tree_map_with_path(add, params, updates, axes, is_leaf=is_encoded)


def axes_or_unnamed(axes: AxesTree, params: Tree) -> AxesTree:
    """The axes of each parameter, a tree with the structure of `params`. If `axes` is None, tuples of None; otherwise a
    tree that has the axes of each parameter at its name, in any containers."""
    named = {path_name(path): names for path, names in jax.tree_util.tree_leaves_with_path(axes, is_leaf=is_axes)}

    def of_weight(path: KeyPath, w: Any) -> Axes:
        if axes is None:
            return (None,) * w.ndim
        name = path_name(path)
        if name not in named:
            raise UserError(f"axes: {name} has no axes{nearest(name, named)}; add a tuple with a name per dimension")
        return named[name]

    return jax.tree_util.tree_map_with_path(of_weight, params, is_leaf=is_encoded)


def widened(grads: Tree) -> Tree:
    """Gradients, with float16 as float32: squares of float16 below 2.4e-4 are zero, and above 256 infinite."""
    return jax.tree.map(lambda g: g.astype(jnp.float32) if g.dtype == jnp.float16 else g, grads)


def rounded_by_hash(
    x: Shaped[Array, "*shape"], dtype: DTypeLike, count: Int[Array, ""] | int = 0
) -> Shaped[Array, "*shape"]:
    """`x` in `dtype`. To bfloat16, it is rounded up or down by a hash of its bits and of `count`, with expectation x.

    For sums that are stored again and again: rounded to nearest, they would lose every term below half of their last
    bit. It needs no random key, and equal values are rounded alike in any slice of an array.
    """
    if dtype != jnp.bfloat16 or x.dtype != jnp.float32:
        return x.astype(dtype)
    seed = scramble(jnp.asarray(count).astype(jnp.uint32))
    return rounded_with(scramble(jax.lax.bitcast_convert_type(x, jnp.uint32) ^ seed) >> 16, x)


def map_with_keys(
    function: Callable[..., Any],
    arrays: Tree,
    read_only: Tree,
    key: jax.Array | None,
    axes: Axes,
    layer: jax.Array | None,
    vocab_slice: VocabSlice | None,
) -> Tree:
    """Replaces the arrays of a leaf by `function(arrays, read_only, key)`.

    Each layer of a stack and each row of a vocabulary matrix has its own key, derived from `key` (None: nothing is
    random). It is the same if the layer or row is updated separately. A vocabulary matrix is updated some rows at a
    time, in place; otherwise XLA might store the random bits of all rows, and float32 values computed from them."""
    if key is None:
        return function(arrays, read_only, key)
    shape = jax.tree.leaves(arrays)[0].shape
    if (keys_of_rows := row_keys(key, axes, shape, vocab_slice)) is not None:
        dim = axes.index("vocab")

        def update(arrays: Tree, read_only: tuple[Tree, jax.Array], *_: jax.Array) -> Tree:
            rows, keys_of_rows = read_only
            return jax.vmap(function, (dim, dim, 0), dim)(arrays, rows, keys_of_rows.reshape(-1))

        if vocab_slice is not None:  # few rows
            return update(arrays, (read_only, keys_of_rows))
        return update_rows(update, arrays, (read_only, keys_of_rows), axes, dim)
    if not is_stacked(axes):
        return function(arrays, read_only, key)
    if layer is not None:
        return function(arrays, read_only, jax.random.fold_in(key, layer))
    keys_of_layers = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(shape[0]))
    return jax.vmap(function)(arrays, read_only, keys_of_layers)


def _add(w: jax.Array, u: jax.Array, key: jax.Array | None) -> jax.Array:
    # In a model with quantized matrices, vectors are stored in float32, so they are not rounded.
    return rounded(w.astype(jnp.float32) + u.astype(jnp.float32), w.dtype, key)


def row_keys(key: jax.Array, axes: Axes, shape: tuple[int, ...], vocab_slice: VocabSlice | None) -> jax.Array | None:
    """A key for each row of a vocabulary matrix, [rows, 1] or [1, rows]. Returns None for other weights."""
    if "vocab" not in axes or is_stacked(axes):
        return None
    dim = axes.index("vocab")
    rows = jnp.arange(shape[dim], dtype=jnp.int32) if vocab_slice is None else vocab_slice.rows
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, rows)
    return keys.reshape([-1 if d == dim else 1 for d in range(len(shape))])


def _requantize(w: QTensor, update: tuple[jax.Array, jax.Array | None], *_: jax.Array) -> QTensor:
    u, seeds = update
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
        raise UserError(f"optimizer.kernel=triton: {error}; use optimizer.kernel=none") from error
    return dataclasses.replace(w, codes=codes, scale=scale)


def _block_seeds(
    key: jax.Array, w: QTensor, axes: Axes, layer: jax.Array | None, vocab_slice: VocabSlice | None
) -> jax.Array:
    """A random word for each block, from the key of its layer and its position in the complete matrix."""
    sizes = list(w.scale.shape)
    places = [jnp.arange(size, dtype=jnp.uint32) for size in sizes]
    keys = key.reshape(1)
    if is_stacked(axes):
        layers = layer
        if layers is None:
            layers = places.pop(0)
            _ = sizes.pop(0)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.atleast_1d(layers))
    if vocab_slice is not None:  # each block is within one row
        dim = axes.index("vocab")
        places[dim] = vocab_slice.rows.astype(jnp.uint32)
        sizes[dim] = vocab_slice.shape[dim]
    place = jnp.zeros((), jnp.uint32)
    for index, size in zip(places, sizes, strict=True):
        place = place[..., None] * jnp.uint32(size) + index
    words = jax.vmap(jax.random.bits)(keys).reshape(-1, *[1] * len(sizes))
    return scramble(place ^ words).reshape(w.scale.shape)


def leaf_key(key: jax.Array, path: KeyPath) -> jax.Array:
    """The key of a leaf, derived from its name."""
    return jax.random.fold_in(key, leaf_number(path))


def leaf_number(path: KeyPath) -> int:
    """32 bits that depend on the name of a leaf."""
    return zlib.crc32(jax.tree_util.keystr(path).encode())


def sum_of_squares(tree: Tree) -> jax.Array:
    """The sum of squares of all leaves, in float32."""
    return sum((jnp.sum(jnp.square(x.astype(jnp.float32))) for x in jax.tree.leaves(tree)), jnp.zeros((), jnp.float32))


def global_norm(tree: Tree) -> jax.Array:
    """The Euclidean norm of all leaves together, summed in float32."""
    return jnp.sqrt(sum_of_squares(tree))
