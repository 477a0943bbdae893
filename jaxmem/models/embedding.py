"""Lookup of token embeddings in a sharded matrix.

XLA's partitioner would all-gather the matrix, or send more than needed, so the lookup runs in `jax.shard_map` with
explicit communication. For B bytes on each of D devices, an all-to-all sends (D - 1) / D B bytes per device; an
all-gather sends (D - 1) B.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxmem.kernels.scopes import purpose
from jaxmem.models.layers import Features, Ids, fetch, new_weight
from jaxmem.models.vocab_slices import SLICE_SIZE, VocabOp, VocabOpResult, VocabSlices
from jaxmem.quant import QTensor, values_of
from jaxmem.sharding.arrays import constrain, map_devices, sum_parts, vocab_over
from jaxmem.sharding.gathering import gather, gather_quantized, stored_axes
from jaxmem.sharding.host import fetch_from_host, is_on_host
from jaxmem.sharding.layout import Layout, current, shard_count
from jaxmem.sharding.table import Axes
from jaxmem.sharding.weights import Weight, proxy_of, stored_of
from jaxmem.stack.call import intercepted
from jaxmem.typing import Tree

RESIDUAL: Axes = ("batch", "stream", "embed")  # the residual stream
Matrix = jax.Array | QTensor


class Embedding(nnx.Module):
    """A matrix with a row of features for each token of a vocabulary."""

    def __init__(self, rngs: nnx.Rngs, vocab: int, embed: int):
        self.weight = new_weight(rngs, (vocab, embed), ("vocab", "embed"), scale=0.02)
        self.lora: Any = nnx.data(None)  # a low-rank adapter of jaxmem.adapters

    def __call__(self, ids: Ids, dtype: DTypeLike) -> Features:
        x = lookup_param(self.weight, ids, dtype)
        return x if self.lora is None else self.lora.rows(x, ids, partial(fetch, self.weight, dtype))

    def separate(self, ids: Ids, dtype: DTypeLike) -> VocabOpResult | None:
        """The lookup, with functions for its gradients; None with an adapter, which may use the matrix too."""
        if self.lora is not None:
            return None
        return separate_lookup(self.weight.get_value(), ids, self.weight.get_metadata()["axes"], dtype)

    def project(self, x: Float[Array, "*batch embed"]) -> Float[Array, "*batch vocab"]:
        """Logits, for tied embeddings."""
        return x @ fetch(self.weight, x.dtype).T


def lookup_param(param: nnx.Param, ids: Ids, dtype: DTypeLike) -> Float[Array, "batch time width"]:
    return lookup(param.get_value(), ids, param.get_metadata()["axes"], dtype)


@purpose("embedding")
def lookup(matrix: Weight, ids: Ids, axes: Axes, dtype: DTypeLike) -> Features:
    """Rows of an embedding matrix in the compute dtype, sharded like the residual stream. Only these rows of a
    quantized matrix are dequantized.

    Where columns are sharded, each device looks up the tokens of all devices in its own columns, and an all-to-all of
    tokens x embed elements sends the results to the devices of the tokens. The gradient needs the same all-to-all. An
    all-gather of the matrix and a reduce-scatter of its gradient would each send vocab x embed elements, and store it.
    Where rows are sharded (`tensor`), a device returns zeros for the rows of other devices, and the sum is
    reduce-scattered over the sequence dimension. Pipeline stages do the same, and all have the sum.
    """
    if not (over := vocab_over()):
        return _lookup_with_gradient(matrix, ids, axes, dtype)
    ids = ids - jax.lax.axis_index(over) * matrix.shape[0]
    inside = (ids >= 0) & (ids < matrix.shape[0])
    # Ids outside of this part read rows spread over it, since their zero gradients are added fastest to different rows.
    x = _lookup_with_gradient(matrix, ids % matrix.shape[0], axes, dtype)
    return sum_parts(jnp.where(constrain(inside[..., None], *RESIDUAL[:2], None), x, jnp.zeros((), dtype)), over)


def _lookup_with_gradient(matrix: Weight, ids: Ids, axes: Axes, dtype: DTypeLike) -> Features:
    forward = partial(separate_lookup, matrix, ids, axes, dtype)
    if (y := intercepted(VocabOp(matrix, None, forward))) is not None:
        return y
    stored = stored_of(matrix)
    proxy = proxy_of(matrix)
    if proxy is None or proxy is stored:
        return _lookup(stored, ids, axes, dtype)

    @jax.custom_vjp
    def looked_up(_: jax.Array, matrix: Matrix, ids: jax.Array) -> jax.Array:
        return _lookup(matrix, ids, axes, dtype)

    def back(ids: jax.Array, g: jax.Array) -> tuple[jax.Array, None, None]:
        return _matrix_gradient(proxy.shape, ids, axes, g).astype(proxy.dtype), None, None

    looked_up.defvjp(lambda proxy, matrix, ids: (looked_up(proxy, matrix, ids), ids), back)
    return looked_up(proxy, stored, ids)


@purpose("embedding")
def separate_lookup(matrix: Weight, ids: Ids, axes: Axes, dtype: DTypeLike) -> VocabOpResult:
    """The lookup, with a function for the gradient of the matrix."""
    stored = stored_of(matrix)

    def weight_gradient(
        g: jax.Array, weight: Matrix, slices: VocabSlices | None = None, j: jax.Array | None = None
    ) -> jax.Array:
        if slices is None or j is None:
            return _matrix_gradient(weight.shape, ids, axes, g)
        return _matrix_gradient((slices.size, weight.shape[1]), slices.positions(ids, j), axes, g)

    return VocabOpResult(_lookup(stored, ids, axes, dtype), lambda _: None, weight_gradient)


def take_rows(matrix: Matrix, ids: jax.Array, dtype: DTypeLike, mode: str | None = None) -> jax.Array:
    """Rows of a matrix on this device; its gradient is summed in float32. Blocks of a quantized matrix are along its
    rows, so that each row has its own codes and scales."""

    def take(x: jax.Array) -> jax.Array:
        if x.shape[0] < matrix.shape[0]:  # one value for all rows
            return fetch_from_host(x).reshape(*[1] * (ids.ndim - 1), *x.shape)
        if is_on_host(x):  # rows are fetched one at a time, which is fast for few ids
            return jax.lax.map(lambda i: fetch_from_host(x[i]), ids.reshape(-1)).reshape(*ids.shape, -1)
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return jnp.take(x, ids, axis=0, mode=mode)
        # The cast makes the gradient a sum in float32: in bfloat16, a row that is read 4,000 times gets half of it.
        return jnp.take(x.astype(jnp.float32), ids, axis=0, mode=mode).astype(x.dtype)

    rows = jax.tree.map(take, matrix)
    return values_of(rows, dtype)


@purpose("embedding")
def _matrix_gradient(shape: tuple[int, ...], ids: jax.Array, axes: Axes, g: jax.Array) -> jax.Array:
    """The gradient of a matrix of this shape, from the gradient of the rows. A lookup is linear, so the gradient does
    not depend on the values. Ids beyond the last row are ignored."""
    linear = partial(_lookup, ids=ids, axes=axes, dtype=g.dtype, check_vma=True)
    return jax.vjp(linear, jnp.zeros(shape, g.dtype))[1](g)[0]


def _lookup(matrix: Matrix, ids: jax.Array, axes: Axes, dtype: DTypeLike, *, check_vma: bool = False) -> jax.Array:
    """Looks up rows. `check_vma` is passed to `jax.shard_map`: jax then tracks the mesh axes along which values vary.
    In a pipeline, differentiating a vmap fails with it, but the vmap of a derivative needs it."""
    if any(map(is_on_host, jax.tree.leaves(matrix))):
        return _lookup_from_host(matrix, ids, axes, dtype)
    layout = current()
    shards = None if layout is None else _Shards.of(layout, axes)
    if isinstance(matrix, QTensor) and layout is not None and shards is not None:
        parts = layout.shard_count("gradients", axes[1])
        aligned = matrix.with_aligned_blocks(parts)
        if aligned is None:  # a device would hold a part of a byte
            shards = None
        else:
            matrix = dataclasses.replace(aligned, size=aligned.size // parts)  # the size on each device
    if layout is None or shards is None:
        matrix = gather_quantized(matrix, axes) if isinstance(matrix, QTensor) else gather(matrix, axes, dtype)
        return constrain(take_rows(matrix, ids, dtype), *RESIDUAL)
    # The lookup uses the sharding of gradients, which is at least as fine as that of the stored matrix.
    if isinstance(matrix, QTensor):
        matrix = jax.tree.map(lambda x: constrain(x, *axes, role="gradients"), matrix)
    else:
        matrix = gather(matrix, axes, dtype, "gradients")
    gradient_specs = jax.tree.map(lambda _: layout.spec("gradients", axes), matrix)
    find = map_devices(
        partial(shards.lookup, dtype=dtype),
        (gradient_specs, layout.spec("activations", shards.tokens)),
        layout.spec("activations", RESIDUAL),
        check_vma=check_vma or not layout.vmapped,
    )
    return find(matrix, ids)


def _lookup_from_host(matrix: Matrix, ids: jax.Array, axes: Axes, dtype: DTypeLike) -> jax.Array:
    """Rows of a matrix in host memory. The complete matrix is copied in slices; each is copied during the lookup in the
    previous slice."""
    vocab = matrix.shape[0]
    stored = shard_count("weights", axes[0])
    width = min(vocab // stored, max(1, SLICE_SIZE // (matrix.shape[1] * stored)))
    slices = VocabSlices(vocab, width, stored)

    def read(j: jax.Array) -> Matrix:
        def read_slice(x: jax.Array, names: Axes) -> jax.Array:
            shared = x.shape[0] == 1
            return fetch_from_host(x) if shared else constrain(slices.read(x, 0, j), *names, role="weights")

        return jax.tree.map(read_slice, matrix, stored_axes(axes, matrix))

    def step(j: jax.Array, carry: tuple[jax.Array, Tree]) -> tuple[jax.Array, Tree]:
        x, rows = carry
        following = read(jnp.minimum(j + 1, slices.count - 1))
        positions = slices.positions(ids, j)
        values = _lookup(rows, positions, axes, dtype)
        inside = constrain((positions < slices.size)[..., None], *RESIDUAL[:2], None)
        return jnp.where(inside, values, x), following

    zeros = constrain(jnp.zeros((*ids.shape, matrix.shape[1]), dtype), *RESIDUAL)
    return jax.lax.fori_loop(0, slices.count, step, (zeros, read(jnp.int32(0))))[0]


@dataclass(frozen=True)
class _Shards:
    """The mesh axes, of size above 1, that shard the matrix."""

    rows: tuple[str, ...]  # the rows of the matrix
    columns: tuple[tuple[int, tuple[str, ...]], ...]  # (dimension of tokens, its columns), outermost first
    tokens: Axes

    @classmethod
    def of(cls, layout: Layout, axes: Axes) -> _Shards | None:
        """The shards of a matrix with these axes; None if this lookup does not apply, since a mesh axis shards the
        columns but not the tokens (no all-to-all is needed), or the rows and the tokens."""
        rows, columns = layout.mesh_axes_each("gradients", axes)
        batch = layout.over("activations", "batch")
        time = layout.over("activations", "time")
        same_tokens = set(layout.over("activations", "stream")) - set(time)
        if not set(columns) <= {*batch, *time} or not set(rows) <= same_tokens:
            return None
        by_dim = tuple((dim, tuple(over)) for dim, over in groupby(columns, key=lambda axis: int(axis in time)))
        return cls(rows, by_dim, ("batch", "time" if rows else "stream"))

    def lookup(self, matrix: Matrix, ids: Int[Array, "b t"], dtype: DTypeLike) -> Float[Array, "b s embed"]:
        """The rows of the tokens of each device."""
        for dim, over in self.columns:
            ids = jax.lax.all_gather(ids, over, axis=dim, tiled=True)
        if self.rows:
            entries = jax.tree.leaves(matrix)[0].shape[0]
            ids = ids - jax.lax.axis_index(self.rows) * entries
            inside = (ids >= 0) & (ids < entries)
            x = jnp.where(inside[..., None], take_rows(matrix, ids, dtype, "clip"), jnp.zeros((), dtype))
            # The sequence has one part for each device that it was gathered from. Each part is scattered over `rows`,
            # so that the all-to-all below sends each device its own tokens.
            parts = math.prod(jax.lax.axis_size(over) for dim, over in self.columns if dim == 1)
            x = x.reshape(ids.shape[0], parts, -1, x.shape[-1])
            x = jax.lax.psum_scatter(x, self.rows, scatter_dimension=2, tiled=True)
            x = x.reshape(ids.shape[0], -1, x.shape[-1])
        else:
            x = take_rows(matrix, ids, dtype)
        # Innermost first: shards along it are neighbours, so the columns are concatenated in their order in the matrix.
        for dim, over in reversed(self.columns):
            x = jax.lax.all_to_all(x, over, dim, 2, tiled=True)
        return x
