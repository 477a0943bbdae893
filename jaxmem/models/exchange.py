"""Operations whose messages are written out, because XLA's partitioner finds worse ones.

Inside `jax.shard_map` every device runs the same function on its own part. D devices that hold B bytes each: an
all-to-all sends (D - 1) / D B of a device, a gather over them brings it (D - 1) B.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxmem import kernels
from jaxmem.errors import UserError
from jaxmem.kernels.attention import ring
from jaxmem.models.vocab_slices import NUMBERS, Slices
from jaxmem.quant import QTensor
from jaxmem.sharding import Axes, Layout, constrain, current, gather, gather_quantized, stored_axes
from jaxmem.sharding.host import fetch_from_host, is_on_host
from jaxmem.sharding.weights import StoredWeight, Weight
from jaxmem.stack.cuts import cut

HEADS: Axes = ("batch", "time", "heads", "head_dim")
UNDIVIDED = (
    "mosaic",
    "pallas",
    "triton",
)  # implementations that XLA's partitioner cannot cut: each device calls its own
STREAM: Axes = ("batch", "stream", "embed")


def lookup(
    table: Weight, ids: Int[Array, "batch time"], axes: Axes, dtype: DTypeLike
) -> Float[Array, "batch time embed"]:
    """Rows of a table, in the compute dtype and where the residual stream lies; of a table in codes these rows alone
    are decoded.

    Devices that each hold a part of every row find it for each other's tokens and exchange what they found: an
    all-to-all of tokens x embed numbers, and the same for the gradient. Gathering the table and reducing its
    gradient would move vocab x embed numbers instead, and hold them whole. Devices that hold some of the rows
    (`tensor`) find zeros for the others; the sum is scattered over the time.
    """
    if (y := cut(Lookup(table, ids, axes, dtype))) is not None:
        return y
    if not isinstance(table, StoredWeight):
        return _found(table, ids, axes, dtype)
    if table.at is None:
        return _found(table.stored, ids, axes, dtype)
    at = table.at

    @jax.custom_vjp
    def found(_: jax.Array, rest: jax.Array | QTensor, ids: jax.Array) -> jax.Array:
        return _found(rest, ids, axes, dtype)

    def back(ids: jax.Array, g: jax.Array) -> tuple[jax.Array, None, None]:
        return _of_rows(at.shape, ids, axes, g).astype(at.dtype), None, None

    found.defvjp(lambda at, rest, ids: (found(at, rest, ids), ids), back)
    return found(at, table.stored, ids)


def _of_rows(shape: tuple[int, ...], ids: jax.Array, axes: Axes, g: jax.Array) -> jax.Array:
    """The gradient of a table of this shape from that of its rows. Finding is linear: it is that of any table. Numbers
    beyond the last row find nothing."""
    _, pull = jax.vjp(lambda any_table: _found(any_table, ids, axes, g.dtype, counted=True), jnp.zeros(shape, g.dtype))
    return pull(g)[0]


@dataclass(frozen=True)
class Lookup:
    """Rows of a table, about to be found."""

    weight: Weight
    ids: Int[Array, "batch time"]
    axes: Axes
    dtype: DTypeLike
    x: None = None

    def forward(self) -> Looked:
        rest = self.weight.stored if isinstance(self.weight, StoredWeight) else self.weight
        return Looked(_found(rest, self.ids, self.axes, self.dtype), self)


@dataclass(frozen=True)
class Looked:
    y: Float[Array, "batch time embed"]
    use: Lookup

    def backward(self, _: jax.Array) -> None:
        return None

    def of_weight(
        self, g: jax.Array, weight: jax.Array | QTensor, slices: Slices | None = None, j: jax.Array | None = None
    ) -> Float[Array, "rows columns"]:
        ids, axes = self.use.ids, self.use.axes
        if slices is None or j is None:
            return _of_rows(weight.shape, ids, axes, g)
        return _of_rows((slices.size, weight.shape[1]), slices.places(ids, j), axes, g)


def _found(
    table: jax.Array | QTensor, ids: jax.Array, axes: Axes, dtype: DTypeLike, *, counted: bool = False
) -> jax.Array:
    """`counted`: jax counts along which mesh axes values differ also where groups of rows are mapped over. On several
    stages it loses count of what is mapped first and differentiated then; of the opposite it needs it."""
    if any(map(is_on_host, jax.tree.leaves(table))):
        return _found_in_slices(table, ids, axes, dtype)
    layout = current()
    split = None if layout is None else _Split.over(layout, axes)
    if isinstance(table, QTensor) and layout is not None and split is not None:
        parts = layout.parts("gradients", axes[1])
        cut = table.with_aligned_blocks(parts)
        if cut is None:  # a device would have a part of a byte
            split = None
        else:
            table = dataclasses.replace(cut, size=cut.size // parts)  # as each device sees it
    if layout is None or split is None:
        table = gather_quantized(table, axes) if isinstance(table, QTensor) else gather(table, axes, dtype)
        return constrain(rows(table, ids, dtype), *STREAM)
    # Split at least as finely as the table rests.
    if isinstance(table, QTensor):
        table = jax.tree.map(lambda x: constrain(x, *axes, role="gradients"), table)
    else:
        table = gather(table, axes, dtype, "gradients")
    find = jax.shard_map(
        partial(split.find, dtype=dtype),
        mesh=layout.mesh,
        in_specs=(
            jax.tree.map(lambda _: layout.spec("gradients", axes), table),
            layout.spec("activations", split.tokens),
        ),
        out_specs=layout.spec("activations", STREAM),
        check_vma=counted or not layout.vmapped,
    )
    return find(table, ids)


def _found_in_slices(table: jax.Array | QTensor, ids: jax.Array, axes: Axes, dtype: DTypeLike) -> jax.Array:
    """Of a table in host memory: all of it comes by, the next slice while rows are found in one."""
    layout, vocab = current(), table.shape[0]
    resting = 1 if layout is None else layout.parts("weights", axes[0])
    width = min(vocab // resting, max(1, NUMBERS // (table.shape[1] * resting)))
    slices = Slices(vocab, width, resting)

    def read(j: jax.Array) -> jax.Array | QTensor:
        def one(x: jax.Array, own: Axes) -> jax.Array:
            shared = x.shape[0] == 1
            return fetch_from_host(x) if shared else constrain(slices.read(x, 0, j), *own, role="weights")

        return jax.tree.map(one, table, stored_axes(axes, table))

    def step(j: jax.Array, carried: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
        x, piece = carried
        following, places = read(jnp.minimum(j + 1, slices.count - 1)), slices.places(ids, j)
        found = _found(piece, places, axes, dtype)
        there = constrain((places < slices.size)[..., None], *STREAM[:2], None)
        return jnp.where(there, found, x), following

    empty = constrain(jnp.zeros((*ids.shape, table.shape[1]), dtype), *STREAM)
    return jax.lax.fori_loop(0, slices.count, step, (empty, read(jnp.int32(0))))[0]


def rows(table: jax.Array | QTensor, ids: jax.Array, dtype: DTypeLike, mode: str | None = None) -> jax.Array:
    """Rows of a table that is at hand. Blocks of one in codes run along its rows: each row is whole, but for what all
    rows share."""

    def taken(x: jax.Array) -> jax.Array:
        if x.shape[0] == 1:
            return fetch_from_host(x).reshape(*[1] * (ids.ndim - 1), *x.shape)
        if is_on_host(x):  # one after the other, for few
            return jax.lax.map(lambda i: fetch_from_host(x[i]), ids.reshape(-1)).reshape(*ids.shape, -1)
        return jnp.take(x, ids, axis=0, mode=mode)

    rows = jax.tree.map(taken, table)
    return rows.dequantize(dtype) if isinstance(rows, QTensor) else rows


def attention(
    q: Float[Array, "batch time heads dim"],
    k: Float[Array, "batch time kv_heads dim"],
    v: Float[Array, "batch time kv_heads dim"],
    *,
    causal: bool,
    window: int | None,
    segment_ids: Int[Array, "batch time"] | None,
    implementation: str | None,
    deterministic: bool = False,
) -> Float[Array, "batch time heads dim"]:
    """`kernels.attention` of arrays split over batch, heads and time. A time split over `context` lies in the order
    of `places`: the ring's, or with a window as it is."""
    layout = current()
    over = () if layout is None else layout.over("activations", "time")
    options: dict[str, Any] = {"window": window, "implementation": implementation, "deterministic": deterministic}
    run: Callable[..., jax.Array] = partial(kernels.attention, causal=causal, **options)
    if layout is None or (not over and implementation not in UNDIVIDED):
        return run(q, k, v, segment_ids=segment_ids, kv_segment_ids=segment_ids)

    def local(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array | None) -> jax.Array:
        if not over:
            return run(q, k, v, segment_ids=ids, kv_segment_ids=ids)
        (axis,) = over
        if window is None:
            return ring.ring(q, k, v, axis=axis, segment_ids=ids)
        return ring.halo(kernels.attention, q, k, v, axis=axis, segment_ids=ids, **options)

    split, tokens = layout.spec("activations", HEADS), layout.spec("activations", ("batch", "time"))
    specs = (split, split, split, None if segment_ids is None else tokens)
    return jax.shard_map(local, mesh=layout.mesh, in_specs=specs, out_specs=split, check_vma=False)(
        q, k, v, segment_ids
    )


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def coded_product(
    x: Float[Array, "*batch inputs"], q: QTensor, axes: Axes, implementation: str
) -> Float[Array, "*batch outputs"]:
    """`kernels.dequant_matmul` of a weight that stays, brought as codes and never decoded whole: each device multiplies
    its own tokens. The codes are brought again for the gradient."""
    return _multiplied(x, q, axes, implementation)


def _multiplied(x: jax.Array, q: QTensor, axes: Axes, implementation: str, *, transposed: bool = False) -> jax.Array:
    x, q = jax.lax.optimization_barrier((x, q))  # not before x is there
    q, layout = gather_quantized(q, axes), current()
    double = isinstance(q.scale, QTensor)
    scale = kernels.Constants(q.scale.codes, q.scale.scale, q.scale.offset) if double else q.scale
    run = partial(
        kernels.dequant_matmul,
        format=q.format,
        block_size=q.block_size,
        inputs=q.shape[0],
        transposed=transposed,
        implementation=implementation,
    )
    try:
        if layout is None:
            return run(x, q.codes, scale)
        tokens = layout.spec("activations", (*("batch", "time")[: x.ndim - 1], None))
        specs = (tokens, layout.spec("compute", (None, None)), layout.spec("compute", ()))
        return jax.shard_map(run, mesh=layout.mesh, in_specs=specs, out_specs=tokens, check_vma=False)(
            x, q.codes, scale
        )
    except ValueError as error:
        raise UserError(f"adapter.matmul: {error}; use auto") from error


coded_product.defvjp(
    lambda x, q, axes, implementation: (_multiplied(x, q, axes, implementation), q),
    lambda axes, implementation, q, g: (_multiplied(g, q, axes, implementation, transposed=True), None),
)


def spread(x: Float[Array, "batch time kv_heads dim"]) -> Float[Array, "batch time more dim"]:
    """Key or value heads, repeated where `tensor` does not divide them: a device has those of its queries."""
    layout = current()
    parts = 1 if layout is None else layout.parts("activations", "heads")
    if x.shape[2] % parts == 0:
        return x
    return constrain(jnp.repeat(x, parts // math.gcd(parts, x.shape[2]), axis=2), *HEADS)


def places(layout: Layout | None, length: int, window: int | None) -> np.ndarray | None:
    """For each index of a time split over `context`, the position that lies there; None: its own."""
    devices = 1 if layout is None else layout.parts("activations", "time")
    return None if devices == 1 or window is not None else ring.places(length, devices)


@dataclass(frozen=True)
class _Split:
    """Which mesh axes of more than one device split what."""

    rows: tuple[str, ...]  # the table's rows
    batch: tuple[str, ...]  # its columns, and the batch too
    time: tuple[str, ...]  # its columns, and the time too
    tokens: Axes

    @classmethod
    def over(cls, layout: Layout, axes: Axes) -> _Split | None:
        """None where devices hold parts of the columns and the same tokens, and nothing could be exchanged; or parts of
        the rows and other tokens."""
        rows, columns = layout.mesh_axes_each("gradients", axes)
        batch, time = layout.over("activations", "batch"), layout.over("activations", "time")
        same_tokens = set(layout.over("activations", "stream")) - set(time)
        if not set(columns) <= {*batch, *time} or not set(rows) <= same_tokens:
            return None
        batch, time = (tuple(axis for axis in columns if axis in tokens) for tokens in (batch, time))
        return cls(rows, batch, time, ("batch", "time" if rows else "stream"))

    def find(self, table: jax.Array | QTensor, ids: Int[Array, "b t"], dtype: DTypeLike) -> Float[Array, "b s embed"]:
        for dim, over in enumerate((self.batch, self.time)):
            ids = jax.lax.all_gather(ids, over, axis=dim, tiled=True) if over else ids
        if self.rows:
            entries = jax.tree.leaves(table)[0].shape[0]
            ids = ids - jax.lax.axis_index(self.rows) * entries
            held = (ids >= 0) & (ids < entries)
            x = jnp.where(held[..., None], rows(table, ids, dtype, "clip"), jnp.zeros((), dtype))
            # Within each part of the time that other devices asked for, so that each gets its own part of the sum.
            parts = jax.lax.axis_size(self.time) if self.time else 1
            x = x.reshape(ids.shape[0], parts, -1, x.shape[-1])
            x = jax.lax.psum_scatter(x, self.rows, scatter_dimension=2, tiled=True)
            x = x.reshape(ids.shape[0], -1, x.shape[-1])
        else:
            x = rows(table, ids, dtype)
        for dim, over in ((1, self.time), (0, self.batch)):
            x = jax.lax.all_to_all(x, over, dim, 2, tiled=True) if over else x
        return x
