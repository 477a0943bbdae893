"""Long sequences: what a layer does to each token by itself, some tokens at a time; attention, some heads at a time.

An MLP of M hidden units over T tokens makes 6 T M bytes of intermediates in a dtype of 2 bytes, and as many for its
gradient. In chunks of t tokens: 6 t M, and each chunk is run again in the backward pass. The weights are gathered once,
before the first chunk; their gradients are added up over the chunks in float32, on each device for its own rows,
and travel once, after the last: 4 bytes a weight of one layer (Bekman et al., arXiv:2506.13996, tile their
MLP likewise).

Attention of H heads over T tokens holds q, k, v and three gradients of that form. In G groups of key heads with their
queries it holds 1/G of these and the output, which is kept for the backward pass with each row's log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxmem.kernels.attention.blockwise import SAVED
from jaxmem.sharding import axis_name, current, gather, shard_first_dim
from jaxmem.sharding.weights import GatheredWeight

Chunk = int | Literal["auto"] | None
Groups = int | Literal["auto"]
Sized = jax.Array | jax.ShapeDtypeStruct
Tree = Any
# (modules, arrays [..., batch, time, width], what is seen beside) -> arrays of the same batch and time
Run = Callable[[Any, Tree, Tree], Tree]

WHOLE = 2**30  # bytes that `auto` spares by pieces, or makes at once
PIECE = 2**28  # bytes of the widest intermediate that it makes at a time
MULTIPLE = 128  # tokens


def tokens_at_once(chunk: Chunk, x: Sized, width: int) -> int | None:
    """Of [batch, time, embed], how many of a row a device takes at once for an MLP of `width` hidden units; None: all.

    `auto` takes all where pieces spare less than `WHOLE`: of three intermediates that wide (a gated MLP's gate, up and
    their product), less the float32 sums that pieces need of the gradients of three weights.

    >>> x = jax.ShapeDtypeStruct((1, 65536, 4096), jnp.bfloat16)
    >>> tokens_at_once("auto", x, 14336), tokens_at_once("auto", x, 2048), tokens_at_once(1000, x, 4096)
    (9344, None, 1000)
    """
    rows, held = _held(x)
    if chunk == "auto":
        layout = current()
        width //= 1 if layout is None else layout.parts("activations", "mlp")
        token = rows * width * x.dtype.itemsize
        spared = 3 * held * token - 3 * 4 * x.shape[-1] * width
        chunk = max(PIECE // token // MULTIPLE, 1) * MULTIPLE if spared > WHOLE else None
    return chunk if chunk is not None and chunk < held else None


def groups_of_heads(groups: Groups, x: Sized, heads: int, kv_heads: int, head_dim: int) -> int:
    """Into how many groups the heads go.

    >>> x = jax.ShapeDtypeStruct((1, 2**19, 4096), jnp.bfloat16)
    >>> groups_of_heads("auto", x, 32, 8, 128)
    8
    """
    if groups != "auto":
        return groups
    layout = current()
    parts = 1 if layout is None else layout.parts("activations", "heads")
    rows, held = _held(x)
    queries = rows * held * heads // parts * head_dim * x.dtype.itemsize
    if queries <= WHOLE or kv_heads % parts:
        return 1
    most = kv_heads // parts
    return next(n for n in range(1, most + 1) if most % n == 0 and (queries <= n * PIECE or n == most))


def _held(x: Sized) -> tuple[int, int]:
    """Rows and time of a device."""
    layout = current()
    split = (1, 1) if layout is None else [layout.parts("activations", axis) for axis in ("batch", "stream")]
    return max(x.shape[0] // split[0], 1), x.shape[1] // split[1]


def by_tokens(run: Run, modules: Any, x: Tree, beside: Tree = None, *, size: int | None) -> Tree:
    """`run` of each token by itself, `size` of a row at a time on each device; None: at once. Leaves of x and beside
    are [..., batch, time, width], and so is what comes out. What is beside has no gradient."""
    if size is None:
        return run(modules, x, beside)
    layout = current()
    first = jax.tree.leaves(x)[0]
    parts = 1 if layout is None else layout.parts("activations", "stream")
    over = () if layout is None else layout.over("activations", "batch")
    held = first.shape[-2] // parts
    least = -(-held // size)
    # What does not come out even is filled up, and copied for it: rather somewhat smaller chunks.
    count = next((n for n in range(least, 2 * least) if held % n == 0), least)
    graphdef, weights = fetched(modules, first.dtype)

    def one(weights: Tree, x: Tree, beside: Tree) -> Tree:
        return run(nnx.merge(graphdef, jax.tree.map(GatheredWeight, weights)), x, beside)

    return _by_tokens(_Cut(one, parts, count, held, over), weights, x, beside)


def fetched(modules: Any, dtype: DTypeLike) -> tuple[Any, Tree]:
    """A module's definition and its weights as they are computed with: matrices in `dtype`, vectors in float32."""
    graphdef, state = nnx.split(modules)

    def fetch(param: nnx.Variable) -> jax.Array:
        value, axes = param.get_value(), param.get_metadata()["axes"]
        if isinstance(value, GatheredWeight):
            return value.value
        return gather(value, axes[len(axes) - value.ndim :], dtype if value.ndim > 1 else jnp.float32)

    ready = {path: fetch(param) for path, param in nnx.to_flat_state(state)}
    return graphdef, nnx.traversals.unflatten_mapping(ready)


@dataclass(frozen=True)
class Long:
    """How layers go through long sequences."""

    chunk: Chunk = None  # tokens at a time
    groups: Groups = 1  # of heads


@dataclass(frozen=True)
class _Cut:
    """Time that lies in parts, each gone through in `count` chunks, the last filled up with zeros."""

    run: Run
    parts: int
    count: int
    held: int  # tokens of a part
    over: tuple[str, ...]  # mesh axes whose devices have rows of their own

    @property
    def size(self) -> int:
        return -(-self.held // self.count)

    def opened(self, x: jax.Array) -> jax.Array:
        """[..., batch, time, width] -> [..., batch, parts, count x size, width]"""
        x = x.reshape(*x.shape[:-2], self.parts, self.held, x.shape[-1])
        more = self.count * self.size - self.held
        return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, more), (0, 0)]) if more else x

    def closed(self, x: jax.Array) -> jax.Array:
        x = x[..., : self.held, :]
        return x.reshape(*x.shape[:-3], -1, x.shape[-1])

    def chunk(self, opened: Tree, j: jax.Array) -> Tree:
        def one(x: jax.Array) -> jax.Array:
            x = jax.lax.dynamic_slice_in_dim(x, j * self.size, self.size, axis=x.ndim - 2)
            return x.reshape(*x.shape[:-3], -1, x.shape[-1])

        return jax.tree.map(one, opened)

    def put(self, opened: Tree, j: jax.Array, chunk: Tree) -> Tree:
        def one(whole: jax.Array, x: jax.Array) -> jax.Array:
            x = x.reshape(*x.shape[:-2], self.parts, self.size, x.shape[-1])
            return jax.lax.dynamic_update_slice_in_dim(whole, x, j * self.size, axis=whole.ndim - 2)

        return jax.tree.map(one, opened, chunk)

    def room(self, chunk: Tree) -> Tree:
        """For all chunks that look like this one."""
        return jax.tree.map(
            lambda x: jnp.zeros((*x.shape[:-2], self.parts, self.count * self.size, x.shape[-1]), x.dtype), chunk
        )


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _by_tokens(cut: _Cut, weights: Tree, x: Tree, beside: Tree) -> Tree:
    opened = jax.tree.map(cut.opened, (x, beside))

    def step(done: Tree, j: jax.Array) -> tuple[Tree, None]:
        return cut.put(done, j, cut.run(weights, *cut.chunk(opened, j))), None

    form = jax.eval_shape(lambda: cut.run(weights, *cut.chunk(opened, jnp.int32(0))))
    done, _ = jax.lax.scan(step, cut.room(form), jnp.arange(cut.count, dtype=jnp.int32))
    return jax.tree.map(cut.closed, done)


def _backward(cut: _Cut, kept: tuple[Tree, Tree, Tree], g: Tree) -> tuple[Tree, Tree, None]:
    weights, x, beside = kept
    opened = jax.tree.map(cut.opened, (x, beside, g))
    apart = _Apart(cut.over)

    def gradients(x: Tree, beside: Tree, g: Tree) -> tuple[Tree, Tree]:
        return jax.vjp(lambda weights, x: cut.run(weights, x, beside), weights, x)[1](g)

    def step(made: tuple[Tree, Tree], j: jax.Array) -> tuple[tuple[Tree, Tree], None]:
        of_weights, of_x = made
        more, own = apart(gradients, *cut.chunk(opened, j))
        of_weights = jax.tree.map(lambda total, w: apart.pinned(total + w.astype(jnp.float32)), of_weights, more)
        return (of_weights, cut.put(of_x, j, own)), None

    zeros = jax.tree.map(lambda w: apart.pinned(jnp.zeros((*apart.groups, *w.shape), jnp.float32)), weights)
    form = jax.eval_shape(lambda: cut.chunk(opened, jnp.int32(0))[0])
    (total, of_x), _ = jax.lax.scan(step, (zeros, cut.room(form)), jnp.arange(cut.count, dtype=jnp.int32))
    of_weights = jax.tree.map(lambda total, w: apart.summed(total.astype(w.dtype)), total, weights)
    return of_weights, jax.tree.map(cut.closed, of_x), None


_by_tokens.defvjp(lambda cut, *kept: (_by_tokens(cut, *kept), kept), _backward)


@dataclass(frozen=True)
class _Apart:
    """Gradients of weights that devices with rows of their own keep to themselves until the last chunk is done: left
    to the partitioner, each chunk's would be reduced."""

    over: tuple[str, ...]

    @property
    def groups(self) -> tuple[int, ...]:
        layout = current()
        return (layout.size(self.over),) if layout is not None and self.over else ()

    def __call__(self, gradients: Callable[..., tuple[Tree, Tree]], *chunks: Tree) -> tuple[Tree, Tree]:
        layout = current()
        if layout is None or not self.over:
            return gradients(*chunks)
        size = layout.size(self.over)
        dims = jax.tree.map(lambda x: x.ndim - 3, chunks)  # the batch
        opened = jax.tree.map(lambda x, d: x.reshape(*x.shape[:d], size, -1, *x.shape[d + 1 :]), chunks, dims)
        with layout.inside_vmap(self.over):
            of_weights, of_x = jax.vmap(gradients, in_axes=dims, out_axes=(0, dims[0]), spmd_axis_name=self.over)(
                *opened
            )
        return of_weights, jax.tree.map(lambda x, like: x.reshape(like.shape), of_x, chunks[0])

    def pinned(self, x: jax.Array) -> jax.Array:
        return shard_first_dim(x, self.over) if self.over else x

    def summed(self, x: jax.Array) -> jax.Array:
        """In the dtype that it has: `jnp.sum` would send float32."""
        return jax.lax.reduce(x, jnp.zeros((), x.dtype), jax.lax.add, (0,)) if self.over else x


def by_heads(attend: Run, modules: Any, x: jax.Array, beside: Tree, groups: int, axes: tuple[str, ...]) -> Tree:
    """`attend` with some of the heads at a time. Leaves of what comes out are [groups, batch, time, width], and only
    what it calls `attention` is kept for the backward pass. Weights whose dimension is one of `axes` are split, others
    shared."""
    if groups == 1:
        return jax.tree.map(lambda x: x[None], attend(modules, x, beside))
    layout = current()
    parts = 1 if layout is None else layout.parts("activations", "heads")
    graphdef, weights = fetched(modules, x.dtype)
    names = {path: param.get_metadata()["axes"] for path, param in nnx.to_flat_state(nnx.state(modules))}

    def opened(path: Any, w: jax.Array) -> jax.Array:
        """Each device's heads in as many groups: [groups, ...]."""
        own = names[tuple(step.key for step in path)][-w.ndim :]
        dim = next((i for i, axis in enumerate(own) if axis is not None and axis_name(axis) in axes), None)
        if dim is None:
            return jnp.broadcast_to(w, (groups, *w.shape))
        w = w.reshape(*w.shape[:dim], parts, groups, -1, *w.shape[dim + 1 :])
        w = jnp.moveaxis(w, dim + 1, 0)
        return w.reshape(groups, *w.shape[1 : dim + 1], -1, *w.shape[dim + 3 :])

    def group(own: Tree, x: jax.Array) -> Tree:
        return attend(nnx.merge(graphdef, jax.tree.map(GatheredWeight, own)), x, beside)

    group = jax.checkpoint(group, policy=jax.checkpoint_policies.save_only_these_names(SAVED), prevent_cse=False)
    return jax.lax.scan(lambda _, own: (None, group(own, x)), None, jax.tree_util.tree_map_with_path(opened, weights))[
        1
    ]


def joined(x: jax.Array) -> jax.Array:
    """[groups, batch, time, width] -> [batch, time, heads x head_dim], each device's heads in their order."""
    layout = current()
    parts = 1 if layout is None else layout.parts("activations", "heads")
    groups, *rows, width = x.shape
    x = jnp.moveaxis(x.reshape(groups, *rows, parts, width // parts), 0, -2)
    return x.reshape(*rows, groups * width)
