"""Parts of the Mosaic GPU programs: indices, copies by TMA, and arithmetic in registers.

Arrays in registers have the layout of the results of matmuls (`WGMMA`); vectors with a value per row or per column have
the reductions of this layout, `BY_ROW` and `BY_COLUMN`. TMA reads zeros beyond the end of an array, and does not write
there."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxmem.kernels.typing import Index, Ref, Tree

from .arguments import visible
from .flash import LOG2E, AttentionCall, MaskArrays

# Names of the dimensions of the grid, which must differ from those of mesh axes.
HEAD, BLOCK, BATCH = "mosaic_head", "mosaic_block", "mosaic_batch"
ROWS = 64
COMPUTE_WARPGROUPS = 2  # number of warpgroups that compute
# Registers of a thread that computes, and of a thread that copies; a multiprocessor has 65,536.
COMPUTE_REGISTERS, COPY_REGISTERS = 240, 24

WGMMA = plgpu.Layout.WGMMA
BY_ROW = WGMMA.reduce(1)
BY_COLUMN = WGMMA.reduce(0)


class BlockRange(NamedTuple):
    """Consecutive blocks, and whether some of their elements are masked."""

    start: Index
    stop: Index
    masked: bool


class FixedBlocks(NamedTuple):
    """Blocks in shared memory that a warpgroup reads once, [COMPUTE_WARPGROUPS, ...], and the barrier of the copies."""

    blocks: tuple[Any, ...]
    arrived: Ref


class Stream(NamedTuple):
    """Blocks that are copied one after the other into [stages, ...]: barriers for a block that has arrived, and for a
    slot that is free."""

    blocks: tuple[Any, ...]
    arrived: Ref
    free: Ref


class SharedGradients(NamedTuple):
    """Shared memory for the gradients that the warpgroups of a program share."""

    ds: Tree  # [2, COMPUTE_WARPGROUPS, keys, queries]: one half is written while the other may still be read
    arrived: Ref
    dq: Tree  # [COMPUTE_WARPGROUPS, queries, columns], copied to global memory


class ForwardMemory(NamedTuple):
    """Shared memory and barriers of the forward program."""

    fixed: FixedBlocks
    keys: Stream
    values: Stream
    rows: Any
    turns: Any


class BackwardMemory(NamedTuple):
    """Shared memory and barriers of the backward program."""

    fixed: FixedBlocks
    queries: Stream
    together: SharedGradients


# ---------------------------------------------------------------- indices


def visited_blocks(
    call: AttentionCall, block: Any, masks: MaskArrays, *, by_keys: bool
) -> tuple[Any, Any, list[BlockRange]]:
    """The first block that a program visits, the end of the blocks, and their ranges, without those that are empty for
    all programs of the kernel. An end that is equal for all programs is a constant, which needs no register."""
    table = call.ranges(by_keys=by_keys)
    has_ids = masks.ids is not None
    ends = [
        jnp.int32(column[0]) if not has_ids and np.all(column == column[0]) else masks.ranges[block, n]
        for n, column in enumerate(table.T)
    ]
    visited = np.flatnonzero(np.any(table[:, :-1] < table[:, 1:], axis=0)).tolist()
    ranges = [BlockRange(ends[part], ends[part + 1], part != 1) for part in ([0] if has_ids else visited)]
    return ends[0], ends[3], ranges


def loop_over(ranges: list[BlockRange], visit: Callable[..., Any], state: Tree) -> Tree:
    for start, stop, masked in ranges:
        state = lax.fori_loop(start, stop, functools.partial(visit, masked=masked), state)
    return state


def slot_of(call: AttentionCall, n: Index) -> jax.Array:
    """The slot of the n-th block of a stream."""
    return lax.rem(n, jnp.int32(call.blocks.stages))


def opaque_zero(n: Index) -> jax.Array:
    """Zero, as a value that the compiler does not know. Addresses that depend on it are computed where they are used;
    otherwise the compiler would keep the descriptors of constant addresses in registers that the sums need."""
    return n - lax.optimization_barrier(n)


def positions(count: int, first: Index, layout: Any) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, (count,), 0, layout=layout) + first


def select_batch(masks: MaskArrays, batch: Any) -> MaskArrays:
    """The mask arrays of one row of the batch."""
    return MaskArrays(*(None if x is None else x.at[batch] for x in masks))


def slice_ids(ids: Any, first: Index, size: int) -> Tree:
    return None if ids is None else ids.at[pl.ds(first, size)]


# ---------------------------------------------------------------- copies


def copy_fixed(held_by: FixedBlocks, number: Index, *sources: Any) -> list[Any]:
    """Copies this warpgroup's blocks to shared memory, and waits for them."""
    held = [x.at[number] for x in held_by.blocks]
    for source, target in zip((x for x in sources if x is not None), held, strict=True):
        plgpu.copy_gmem_to_smem(source, target, held_by.arrived.at[number])
    plgpu.barrier_wait(held_by.arrived.at[number])
    return held


def copy_next(call: AttentionCall, stream: Stream, n: Index, *sources: Any) -> None:
    """Copies the n-th block once its slot is free."""
    slot = slot_of(call, n)
    pl.when(n >= call.blocks.stages)(lambda: plgpu.barrier_wait(stream.free.at[slot]))
    for source, held in zip((x for x in sources if x is not None), stream.blocks, strict=True):
        plgpu.copy_gmem_to_smem(source, held.at[slot], stream.arrived.at[slot])


def write_back(*parts: tuple[Any, Any]) -> None:
    plgpu.commit_smem()
    for source, target in parts:
        plgpu.copy_smem_to_gmem(source, target)
    plgpu.wait_smem_to_gmem(0)


# ---------------------------------------------------------------- arithmetic


def zeros_in(shape: tuple[int, ...], layout: Any) -> jax.Array:
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)


def load_as(ref: Ref, layout: Any) -> jax.Array:
    return plgpu.layout_cast(ref[...], layout)


def broadcast_along(x: jax.Array, shape: tuple[int, ...], dim: int) -> jax.Array:
    return lax.broadcast_in_dim(x, shape, (dim,))


def matmul(shape: tuple[int, int], a: Any, b: Any) -> jax.Array:
    def multiply(accumulator: Tree) -> jax.Array:
        plgpu.wgmma(accumulator, a, b)
        return accumulator[...]

    return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))


def tanh(x: jax.Array) -> jax.Array:
    """tanh, more accurate than the 11 bits of the GPU's own. Where exp2 overflows or underflows, it is 1 or -1."""
    return 1.0 - 2.0 / (jnp.exp2(x * (2.0 * LOG2E)) + 1.0)


def capped_scores(call: AttentionCall, raw: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """Scores in units of `call.unit`, and the derivative of soft-capping."""
    o = call.options
    if o.soft_cap is None:
        return (raw if call.unit == o.scale else raw * o.scale), None
    capped = tanh(raw * (o.scale / o.soft_cap))
    return capped, 1.0 - capped * capped


def masked_scores(
    call: AttentionCall, s: jax.Array, at: Index, key: Any, ids: tuple[Any, Any], dims: tuple[int, int]
) -> jax.Array:
    """Scores, -inf where they are masked. `at`, `key`, `ids`: positions and segment ids of the queries and of the keys.
    `dims`: the dimensions of queries and keys in `s`."""
    at, key, mine, theirs = (
        None if x is None else broadcast_along(x, s.shape, dim)
        for x, dim in zip((at, key, *ids), 2 * dims, strict=True)
    )
    seen = key < call.keys
    near = visible(at, key, offset=call.offset, causal=call.options.causal, window=call.options.window)
    if near is not None:
        seen &= near
    if mine is not None:
        seen &= mine == theirs
    return jnp.where(seen, s, -jnp.inf)
