"""Long sequences: the token-wise operations of a layer in chunks of tokens, and attention in groups of heads.

The intermediates of an MLP with M hidden units on T tokens take 6 T M bytes in a 2-byte dtype, and their gradients 6 T
M more. With chunks of t tokens, both take 6 t M, and each chunk is recomputed in the backward pass. The weights are
gathered once, before the first chunk. Each device sums their gradients over the chunks of its own rows in float32, 4
bytes per weight of one layer, and they are reduced once, after the last chunk. (Bekman et al., arXiv:2506.13996, tile
the MLP in the same way.)

Attention stores q, k, v and three gradients of the same shapes. With G groups of KV heads and their queries it stores
1/G of these, and the output, which is saved for the backward pass with the log-sum-exp of each row.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.tree_util import KeyPath
from jax.typing import DTypeLike

from jaxmem.config.mesh import head_group_counts
from jaxmem.models.layers import fetch
from jaxmem.sharding.arrays import shard_first_dim, sum_over_shards
from jaxmem.sharding.layout import current, shard_axes, shard_count
from jaxmem.sharding.table import axis_name
from jaxmem.sharding.weights import GatheredWeight
from jaxmem.typing import Tree

Array = jax.Array | jax.ShapeDtypeStruct

# (modules, x [..., batch, time, width], other inputs without gradient) -> arrays [..., batch, time, width]
TokenwiseFunction = Callable[[Any, Tree, Tree], Tree]

MIN_SAVING = 2**30  # bytes that chunks or groups must save for `auto` to use them
CHUNK_BYTES = 2**28  # bytes of the widest intermediate of a chunk or group that `auto` chooses
TOKEN_MULTIPLE = 128  # the tokens of a chunk are a multiple of this number


@dataclass(frozen=True)
class Chunking:
    """How layers process long sequences: `memory.mlp_chunk` and `memory.head_groups`."""

    tokens: int | Literal["auto"] | None = None  # tokens of a sequence per chunk; None: all at once
    head_groups: int | Literal["auto"] = 1

    def chunk_size(self, x: Array, width: int) -> int | None:
        """Tokens of a sequence that a device processes at once, for x [batch, time, embed] and an MLP of `width` hidden
        units; None: all of them.

        `auto` uses chunks only where they save at least `MIN_SAVING` bytes: three intermediates of that width (gate, up
        and hidden units of a gated MLP), minus the float32 sums of three weight gradients.

        >>> x = jax.ShapeDtypeStruct((1, 65536, 4096), jnp.bfloat16)
        >>> Chunking("auto").chunk_size(x, 14336), Chunking("auto").chunk_size(x, 2048), Chunking(1000).chunk_size(x, 1)
        (9344, None, 1000)
        """
        chunk = self.tokens
        rows, time = _per_device(x)
        if chunk == "auto":
            width //= shard_count("activations", "mlp")
            token = rows * width * x.dtype.itemsize
            saved = 3 * time * token - 3 * 4 * x.shape[-1] * width
            chunk = max(CHUNK_BYTES // token // TOKEN_MULTIPLE, 1) * TOKEN_MULTIPLE if saved > MIN_SAVING else None
        return chunk if chunk is not None and chunk < time else None

    def group_count(self, x: Array, heads: int, kv_heads: int, head_dim: int, context: int = 1) -> int:
        """The number of groups of heads.

        Args:
            x: [batch, time, embed].
            heads: query heads of the model.
            kv_heads: key and value heads of the model.
            head_dim: the width of a head.
            context: the number of devices that shard each group.

        >>> Chunking(head_groups="auto").group_count(jax.ShapeDtypeStruct((1, 2**19, 4096), jnp.bfloat16), 32, 8, 128)
        8
        """
        if self.head_groups != "auto":
            return self.head_groups
        shards = shard_count("activations", "heads")
        rows, time = _per_device(x)
        queries = rows * time * heads // shards * head_dim * x.dtype.itemsize
        if queries <= MIN_SAVING or kv_heads % shards:
            return 1
        counts = head_group_counts(heads // shards, kv_heads // shards, context)
        if context == 1:  # more groups would compute keys and values more than once
            counts = [n for n in counts if kv_heads // shards % n == 0]
        return next((n for n in counts if queries <= n * CHUNK_BYTES), counts[-1])


def _per_device(x: Array) -> tuple[int, int]:
    """The number of sequences, and of tokens per sequence, of [batch, time, ...] on each device."""
    return max(x.shape[0] // shard_count("activations", "batch"), 1), x.shape[1] // shard_count("activations", "stream")


def map_token_chunks(
    function: TokenwiseFunction, modules: Tree, x: Tree, others: Tree = None, *, size: int | None
) -> Tree:
    """Applies `function` to `size` tokens of a sequence at a time on each device; None: to all tokens at once. Leaves
    of x, of the other inputs and of the result are [..., batch, time, width]."""
    if size is None:
        return function(modules, x, others)
    first = jax.tree.leaves(x)[0]
    shards = shard_count("activations", "stream")
    over = shard_axes("activations", "batch")
    time = first.shape[-2] // shards
    least = -(-time // size)
    # A sequence that is not divisible by the chunks is padded, which copies it; slightly smaller chunks are better.
    count = next((n for n in range(least, 2 * least) if time % n == 0), least)
    graphdef, weights = gather_weights(modules, first.dtype)

    def run(weights: Tree, x: Tree, others: Tree) -> Tree:
        return function(nnx.merge(graphdef, jax.tree.map(GatheredWeight, weights)), x, others)

    return _map_chunks(_Chunks(run, shards, count, time, over), weights, x, others)


def gather_weights(modules: Tree, dtype: DTypeLike) -> tuple[Tree, Tree]:
    """A module's graph definition and its gathered weights: matrices in `dtype`, vectors in float32."""
    graphdef, state = nnx.split(modules)
    gathered = {
        path: fetch(param, dtype if param.get_value().ndim > 1 else jnp.float32)
        for path, param in nnx.to_flat_state(state)
    }
    return graphdef, nnx.traversals.unflatten_mapping(gathered)


@dataclass(frozen=True)
class _Chunks:
    """A sequence sharded into `shards`, each processed in `count` chunks. The last chunk is padded with zeros."""

    run: TokenwiseFunction
    shards: int
    count: int
    time: int  # tokens of a part
    over: tuple[str, ...]  # mesh axes that shard the batch

    @property
    def size(self) -> int:
        return -(-self.time // self.count)

    def split(self, x: jax.Array) -> jax.Array:
        """[..., batch, time, width] -> [..., batch, shards, count x size, width]"""
        x = x.reshape(*x.shape[:-2], self.shards, self.time, x.shape[-1])
        padding = self.count * self.size - self.time
        return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, padding), (0, 0)]) if padding else x

    def join(self, x: jax.Array) -> jax.Array:
        x = x[..., : self.time, :]
        return x.reshape(*x.shape[:-3], -1, x.shape[-1])

    def read(self, arrays: Tree, j: jax.Array) -> Tree:
        def read_chunk(x: jax.Array) -> jax.Array:
            x = jax.lax.dynamic_slice_in_dim(x, j * self.size, self.size, axis=x.ndim - 2)
            return x.reshape(*x.shape[:-3], -1, x.shape[-1])

        return jax.tree.map(read_chunk, arrays)

    def write(self, arrays: Tree, j: jax.Array, chunk: Tree) -> Tree:
        def write_chunk(array: jax.Array, x: jax.Array) -> jax.Array:
            x = x.reshape(*x.shape[:-2], self.shards, self.size, x.shape[-1])
            return jax.lax.dynamic_update_slice_in_dim(array, x, j * self.size, axis=array.ndim - 2)

        return jax.tree.map(write_chunk, arrays, chunk)

    def zeros(self, chunk: Tree) -> Tree:
        """Zeros for all chunks, from arrays with the shapes of one chunk."""
        return jax.tree.map(
            lambda x: jnp.zeros((*x.shape[:-2], self.shards, self.count * self.size, x.shape[-1]), x.dtype), chunk
        )


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _map_chunks(chunks: _Chunks, weights: Tree, x: Tree, others: Tree) -> Tree:
    inputs = jax.tree.map(chunks.split, (x, others))

    def step(y: Tree, j: jax.Array) -> tuple[Tree, None]:
        return chunks.write(y, j, chunks.run(weights, *chunks.read(inputs, j))), None

    shape = jax.eval_shape(lambda: chunks.run(weights, *chunks.read(inputs, jnp.int32(0))))
    y, _ = jax.lax.scan(step, chunks.zeros(shape), jnp.arange(chunks.count, dtype=jnp.int32))
    return jax.tree.map(chunks.join, y)


def _map_chunks_backward(chunks: _Chunks, saved: tuple[Tree, Tree, Tree], g: Tree) -> tuple[Tree, Tree, None]:
    """Each device sums the weight gradients of its own rows, [devices, ...], and they are reduced after the last chunk.
    XLA's partitioner would reduce them after each chunk."""
    weights, x, others = saved
    inputs = jax.tree.map(chunks.split, (x, others, g))
    over = chunks.over
    layout = current()
    groups = (layout.size(over),) if layout is not None and over else ()

    def pinned(x: jax.Array) -> jax.Array:
        return shard_first_dim(x, over) if groups else x

    def gradients(x: Tree, others: Tree, g: Tree) -> tuple[Tree, Tree]:
        return jax.vjp(lambda weights, x: chunks.run(weights, x, others), weights, x)[1](g)

    def of_devices(*chunk: Tree) -> tuple[Tree, Tree]:
        if layout is None or not groups:
            return gradients(*chunk)
        dims = jax.tree.map(lambda x: x.ndim - 3, chunk)  # the batch
        split = jax.tree.map(lambda x, d: x.reshape(*x.shape[:d], *groups, -1, *x.shape[d + 1 :]), chunk, dims)
        mapped = jax.vmap(gradients, in_axes=dims, out_axes=(0, dims[0]), spmd_axis_name=over)
        with layout.inside_vmap(over):
            of_weights, of_x = mapped(*split)
        return of_weights, jax.tree.map(lambda x, like: x.reshape(like.shape), of_x, chunk[0])

    def step(sums: tuple[Tree, Tree], j: jax.Array) -> tuple[tuple[Tree, Tree], None]:
        of_weights, of_x = sums
        weight_gradients, x_gradient = of_devices(*chunks.read(inputs, j))
        of_weights = jax.tree.map(lambda total, w: pinned(total + w.astype(jnp.float32)), of_weights, weight_gradients)
        return (of_weights, chunks.write(of_x, j, x_gradient)), None

    def reduced(total: jax.Array, w: jax.Array) -> jax.Array:
        total = total.astype(w.dtype)
        return sum_over_shards(total) if groups else total

    zeros = jax.tree.map(lambda w: pinned(jnp.zeros((*groups, *w.shape), jnp.float32)), weights)
    shape = jax.eval_shape(lambda: chunks.read(inputs, jnp.int32(0))[0])
    (total, of_x), _ = jax.lax.scan(step, (zeros, chunks.zeros(shape)), jnp.arange(chunks.count, dtype=jnp.int32))
    return jax.tree.map(reduced, total, weights), jax.tree.map(chunks.join, of_x), None


_map_chunks.defvjp(lambda chunks, *saved: (_map_chunks(chunks, *saved), saved), _map_chunks_backward)


def map_head_groups(
    attend: Callable[[Any, jax.Array], jax.Array],
    modules: Tree,
    x: jax.Array,
    groups: int,
    heads: Mapping[str, int],
    shards: int,
) -> jax.Array:
    """Returns [groups, batch, time, width]: `attend(modules, x)` for one group of heads at a time. Only the arrays that
    the attention kernel names are saved for the backward pass. `heads`: the number of heads of each axis of weights
    that is divided into groups; other weights are shared. `shards`: the number of devices that shard each group. KV
    heads that several groups or devices need are repeated."""
    if groups == 1:
        return attend(modules, x)[None]
    from jaxmem.kernels.fused_attention.derivative import SAVED

    graphdef, weights = gather_weights(modules, x.dtype)
    names = {path: param.get_metadata()["axes"] for path, param in nnx.to_flat_state(nnx.state(modules))}

    def split(path: KeyPath, w: jax.Array) -> jax.Array:
        """The heads of each device in groups: [groups, ...]."""
        axes_of_w = names[tuple(step.key for step in path)][-w.ndim :]
        dim = next((i for i, axis in enumerate(axes_of_w) if axis is not None and axis_name(axis) in heads), None)
        if dim is None:
            return jnp.broadcast_to(w, (groups, *w.shape))
        count = heads[axis_name(axes_of_w[dim])]
        repeats = math.lcm(count, shards * groups) // count
        if repeats > 1:
            with_heads = w.reshape(*w.shape[:dim], count, -1, *w.shape[dim + 1 :])
            w = jnp.repeat(with_heads, repeats, axis=dim).reshape(*w.shape[:dim], -1, *w.shape[dim + 1 :])
        w = w.reshape(*w.shape[:dim], shards, groups, -1, *w.shape[dim + 1 :])
        w = jnp.moveaxis(w, dim + 1, 0)
        return w.reshape(groups, *w.shape[1 : dim + 1], -1, *w.shape[dim + 3 :])

    def group(group_weights: Tree, x: jax.Array) -> jax.Array:
        return attend(nnx.merge(graphdef, jax.tree.map(GatheredWeight, group_weights)), x)

    group = jax.checkpoint(group, policy=jax.checkpoint_policies.save_only_these_names(SAVED), prevent_cse=False)
    split_weights = jax.tree_util.tree_map_with_path(split, weights)
    return jax.lax.scan(lambda _, group_weights: (None, group(group_weights, x)), None, split_weights)[1]


def join_head_groups(x: jax.Array, shards: int) -> jax.Array:
    """[groups, batch, time, width] -> [batch, time, heads x head_dim], with the heads of each device in order."""
    groups, *rows, width = x.shape
    x = jnp.moveaxis(x.reshape(groups, *rows, shards, width // shards), 0, -2)
    return x.reshape(*rows, groups * width)
