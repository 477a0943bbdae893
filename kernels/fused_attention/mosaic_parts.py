"""Parts of the Mosaic GPU programs: indices, copies by TMA, and arithmetic in registers.

Arrays in registers have the layout of the results of matmuls (`WGMMA`); vectors with a value per row or per column have
the reductions of this layout, `BY_ROW` and `BY_COLUMN`. TMA reads zeros beyond the end of an array, and does not write
there."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .flash import LOG2E, AttentionCall, MaskArrays, seen_in_block

# Names of the dimensions of the grid, which must differ from those of mesh axes.
HEAD, BLOCK, BATCH = "mosaic_head", "mosaic_block", "mosaic_batch"
ROWS = 64
COMPUTING = 2  # number of warpgroups that compute
# Registers of a thread that computes, and of a thread that copies; a multiprocessor has 65,536.
REGISTERS, FEW_REGISTERS = 240, 24

WGMMA = plgpu.Layout.WGMMA
BY_ROW, BY_COLUMN = WGMMA.reduce(1), WGMMA.reduce(0)


class OwnBlocks(NamedTuple):
    """Blocks in shared memory that a warpgroup reads once, [COMPUTING, ...], and the barrier of their copies."""

    blocks: tuple[Any, ...]
    arrived: Any


class Stream(NamedTuple):
    """Blocks that are copied one after the other into [stages, ...]: barriers for a block that has arrived, and for a
    slot that is free."""

    blocks: tuple[Any, ...]
    arrived: Any
    free: Any


class SharedGradients(NamedTuple):
    """Shared memory for the gradients that the warpgroups of a program share."""

    ds: Any  # [2, COMPUTING, keys, queries]: one half is written while the other may still be read
    arrived: Any
    dq: Any  # [COMPUTING, queries, columns], copied to global memory


# ---------------------------------------------------------------- indices


def slot_of(call: AttentionCall, n: Any) -> jax.Array:
    """The slot of the n-th block of a stream."""
    return lax.rem(n, jnp.int32(call.blocks.stages))


def opaque_zero(n: Any) -> jax.Array:
    """Zero, as a value that the compiler does not know. Addresses that depend on it are computed where they are used;
    otherwise the compiler would keep the descriptors of constant addresses in registers that the sums need."""
    return n - lax.optimization_barrier(n)


def positions(count: int, first: Any, layout: Any) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, (count,), 0, layout=layout) + first


def select_batch(masks: MaskArrays, batch: Any) -> MaskArrays:
    """The mask arrays of one row of the batch."""
    return MaskArrays(*(None if x is None else x.at[batch] for x in masks))


def slice_ids(ids: Any, first: Any, size: int) -> Any:
    return None if ids is None else ids.at[pl.ds(first, size)]


# ---------------------------------------------------------------- copies


def copy_own(own: OwnBlocks, number: Any, *sources: Any) -> list[Any]:
    """Copies this warpgroup's blocks to shared memory, and waits for them."""
    held = [x.at[number] for x in own.blocks]
    for source, target in zip((x for x in sources if x is not None), held, strict=True):
        plgpu.copy_gmem_to_smem(source, target, own.arrived.at[number])
    plgpu.barrier_wait(own.arrived.at[number])
    return held


def copy_next(call: AttentionCall, stream: Stream, n: Any, *sources: Any) -> None:
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


def load_as(ref: Any, layout: Any) -> jax.Array:
    return plgpu.layout_cast(ref[...], layout)


def broadcast_along(x: jax.Array, shape: tuple[int, ...], dim: int) -> jax.Array:
    return lax.broadcast_in_dim(x, shape, (dim,))


def matmul(shape: tuple[int, int], a: Any, b: Any) -> jax.Array:
    def multiply(accumulator: Any) -> jax.Array:
        plgpu.wgmma(accumulator, a, b)
        return accumulator[...]

    return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))


def tanh(x: jax.Array) -> jax.Array:
    """tanh, more accurate than the 11 bits of the GPU's own. Where exp2 overflows or underflows, it is 1 or -1."""
    return 1.0 - 2.0 / (jnp.exp2(x * (2.0 * LOG2E)) + 1.0)


def masked_scores(
    call: AttentionCall, s: jax.Array, at: Any, key: Any, mine: Any, theirs: Any, dims: tuple[int, int]
) -> jax.Array:
    """Scores, -inf where they are masked. `dims`: the dimensions of queries and keys in `s`."""
    at, key, mine, theirs = (
        None if x is None else broadcast_along(x, s.shape, dim)
        for x, dim in zip((at, key, mine, theirs), 2 * dims, strict=True)
    )
    return jnp.where(seen_in_block(call, at, key, mine, theirs), s, -jnp.inf)
