"""What the programs of the Mosaic GPU kernels are made of: places, copies by TMA, arithmetic on what lies in registers.

Arrays in registers have the layout that matmuls leave them in (`WGMMA`): of numbers for each row, `BY_ROW`, of numbers
for each column, `BY_COLUMN`. TMA fills with zeros what it reads beyond the end of an array, and writes nothing there.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .block import LOG2E, Call, MaskArrays, seen_in_block
from .mask import keep_from_words, row_words

# The dimensions of the grid. A mesh around the kernel may have axes of shorter names.
HEAD, BLOCK, BATCH = "mosaic_head", "mosaic_block", "mosaic_batch"
ROWS = 64
COMPUTING = 2  # warpgroups
# Of the 65,536 registers of a multiprocessor, a thread that computes has these, and one that copies.
REGISTERS, FEW_REGISTERS = 240, 24

WGMMA = plgpu.Layout.WGMMA
BY_ROW, BY_COLUMN = WGMMA.reduce(1), WGMMA.reduce(0)


class Own(NamedTuple):
    """What a warpgroup reads once and keeps in shared memory: [COMPUTING, ...], and when it is there."""

    held: tuple[Any, ...]
    here: Any


class Stream(NamedTuple):
    """Blocks that come one after the other into [stages, ...]: when one is here, when its place is free."""

    held: tuple[Any, ...]
    here: Any
    free: Any


class SharedGradients(NamedTuple):
    """What the warpgroups of a program make for each other."""

    ds: Any  # [2, COMPUTING, keys, queries]: while one is written, the one before may still be read
    here: Any
    dq: Any  # [COMPUTING, queries, columns], on its way to memory


# ---------------------------------------------------------------- places


def reversed_block(length: int, size: int) -> jax.Array:
    """The queries' block of this program: the last ones come first, since under `causal` they take the longest."""
    return pl.cdiv(length, size) - 1 - lax.axis_index(BLOCK)


def slot_of(call: Call, n: Any) -> jax.Array:
    """Where the n-th block of a stream lies."""
    return lax.rem(n, jnp.int32(call.blocks.stages))


def opaque_zero(n: Any) -> jax.Array:
    """What is reckoned from it is made where it is used. Descriptors of what lies still the compiler would else make
    once for all, and keep in registers that the sums need."""
    return n - lax.optimization_barrier(n)


def positions(count: int, first: Any, layout: Any) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, (count,), 0, layout=layout) + first


def select_batch(masks: MaskArrays, batch: Any) -> MaskArrays:
    """The seed has no rows of the batch."""
    rows = [None if x is None else x.at[batch] for x in masks[1:]]
    return MaskArrays(masks.seed, *rows)


def slice_ids(ids: Any, first: Any, size: int) -> Any:
    return None if ids is None else ids.at[pl.ds(first, size)]


# ---------------------------------------------------------------- copies


def copy_own(own: Own, number: Any, *sources: Any) -> list[Any]:
    """This warpgroup's own part, brought."""
    held = [x.at[number] for x in own.held]
    for source, target in zip((x for x in sources if x is not None), held, strict=True):
        plgpu.copy_gmem_to_smem(source, target, own.here.at[number])
    plgpu.barrier_wait(own.here.at[number])
    return held


def copy_next(call: Call, stream: Stream, n: Any, *sources: Any) -> None:
    """The n-th block, once its place is free."""
    slot = slot_of(call, n)
    pl.when(n >= call.blocks.stages)(lambda: plgpu.barrier_wait(stream.free.at[slot]))
    for source, held in zip((x for x in sources if x is not None), stream.held, strict=True):
        plgpu.copy_gmem_to_smem(source, held.at[slot], stream.here.at[slot])


def copy_keys(
    call: Call,
    batch: Any,
    head: Any,
    groups: int,
    begin: Any,
    end: Any,
    sources: tuple[Any, Any, Any],
    keys: Stream,
    values: Stream,
) -> None:
    """What the third warpgroup does where a program goes through the keys from one block to another."""
    plgpu.set_max_registers(FEW_REGISTERS, action="decrease")
    k_ref, v_ref, kv_ids = sources
    kv_head = lax.div(head, jnp.int32(groups))

    def bring(j: Any) -> None:
        at = j * call.blocks.keys
        here, n = (batch, pl.ds(at, call.blocks.keys), kv_head), j - begin
        copy_next(call, keys, n, k_ref.at[here], slice_ids(kv_ids, at, call.blocks.keys))
        copy_next(call, values, n, v_ref.at[here])

    pl.loop(begin, end)(bring)


def write_back(*parts: tuple[Any, Any]) -> None:
    plgpu.commit_smem()
    for source, target in parts:
        plgpu.copy_smem_to_gmem(source, target)
    plgpu.wait_smem_to_gmem(0)


# ---------------------------------------------------------------- arithmetic


def zeros_in(shape: tuple[int, ...], layout: Any) -> jax.Array:
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)


def load_as(ref: Any, layout: Any) -> jax.Array:
    return plgpu.layout_cast(ref[...], layout)


def broadcast_along(x: jax.Array, shape: tuple[int, ...], dim: int) -> jax.Array:
    return lax.broadcast_in_dim(x, shape, (dim,))


def products(shape: tuple[int, int], *pairs: tuple[Any, Any]) -> list[jax.Array]:
    """a @ b of each, all begun before the first is waited for."""

    def multiply(*sums: Any) -> list[jax.Array]:
        for held, (a, b) in zip(sums, pairs, strict=True):
            plgpu.wgmma(held, a, b)
        return [held[...] for held in sums]

    return pl.run_scoped(multiply, *[plgpu.WGMMAAccumulatorRef(shape, jnp.float32)] * len(pairs))


def add_products(*terms: tuple[jax.Array, Any, Any]) -> tuple[jax.Array, ...]:
    """sum + a @ b of each."""

    def multiply(sums: Any) -> None:
        for held, (_, a, b) in zip(sums, terms, strict=True):
            plgpu.wgmma(held, a, b)

    return pl.run_state(multiply)(tuple(plgpu.WGMMAAccumulatorRef.init(x) for x, _, _ in terms))


def tanh(x: jax.Array) -> jax.Array:
    """The GPU's own is good to 11 bits. exp2 overflows to infinity or to 0, and both give the right end."""
    return 1.0 - 2.0 / (jnp.exp2(x * (2.0 * LOG2E)) + 1.0)


def masked_scores(
    call: Call, s: jax.Array, at: Any, key: Any, mine: Any, theirs: Any, dims: tuple[int, int]
) -> jax.Array:
    """`dims`: along which one of the scores the queries lie, and the keys."""
    at, key, mine, theirs = (
        None if x is None else broadcast_along(x, s.shape, dim)
        for x, dim in zip((at, key, mine, theirs), 2 * dims, strict=True)
    )
    return jnp.where(seen_in_block(call, at, key, mine, theirs), s, -jnp.inf)


def dropout_words(masks: MaskArrays, row: Any, at: jax.Array) -> Any:
    """Of dropout, for a row of batch and heads and queries at these positions."""
    return None if masks.seed is None else row_words((masks.seed[0], masks.seed[1]), row, at)


def dropout_factor(call: Call, words: Any, key: jax.Array, shape: tuple[int, ...], dims: tuple[int, int]) -> jax.Array:
    """What dropout makes of each probability's weight: 0, or 1 / (1 - rate)."""
    rate = call.options.dropout
    first, second = (broadcast_along(x, shape, dims[0]) for x in words)
    kept = keep_from_words(first, second, broadcast_along(key, shape, dims[1]), rate)
    return jnp.where(kept, 1.0 / (1.0 - rate), 0.0)
