"""What the Triton programs receive: block sizes, the blocks that a program visits, the rows of the backward pass.

One kernel computes the output and the log-sum-exp of each row. In the backward pass one kernel computes dq and another
kernel dk and dv. The blocks to visit are computed here, as an array that the kernels read. Packed sequences have sorted
segment ids, so kernels skip complete blocks.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from jaxmem.kernels.triton_launch import block_size, next_power_of_2

from .arguments import Extras, Options, Residuals
from .derivative import row_products

LOG2E = math.log2(math.e)


@functools.cache
def block_ranges(
    options: Options, queries: int, keys: int, blocks: tuple[int, int], *, by_keys: bool
) -> Int32[np.ndarray, "blocks 4"]:
    """For each block of queries, the blocks of keys that are not completely masked; with `by_keys`, for each block of
    keys, the blocks of queries. The columns are the ends of three ranges: partly masked, unmasked, and partly masked
    blocks. `blocks`: the numbers of queries and of keys of a block. Segments are ignored."""
    block, size = blocks[::-1] if by_keys else blocks
    count, length = (keys, queries) if by_keys else (queries, keys)
    # The first positions of blocks, as positions of the other sequence.
    first = np.arange(0, count, block) + (length - count)
    last = first + block - 1
    low = all_low = np.zeros_like(first)
    high = np.full_like(first, length)
    # Rows beyond the end of the last block of queries add zero, so this block needs no mask.
    all_high = -(-high // size) * size if by_keys else high
    window = options.window
    if options.causal or window is not None:
        if by_keys:
            low = first
            all_low = last
        else:
            high, all_high = (np.clip(x + 1, 0, length) for x in (last, first))
    if window is not None:
        if by_keys:
            high, all_high = (np.clip(x + window, 0, length) for x in (last, first))
        else:
            low = first - window + 1
            all_low = last - window + 1
    begin = np.maximum(low, 0) // size
    end = -(-high // size)
    all_begin = np.clip(-(-np.maximum(all_low, 0) // size), begin, np.maximum(begin, end))
    all_end = np.clip(all_high // size, all_begin, np.maximum(all_begin, end))
    return np.stack([begin, all_begin, all_end, end], axis=1).astype(np.int32)


class BlockSizes(NamedTuple):
    """Block sizes of a kernel: powers of two, at least 16 for the tensor cores."""

    queries: int
    keys: int
    warps: int
    stages: int


def score_unit(options: Options) -> float:
    """The unit of the scores that kernels compute: differences of scores are computed before they are multiplied by the
    unit, so they are as exact for scores of 10,000 as for small scores. The scale can be the unit if it is positive, so
    that the order of scores is that of the dot products, and large enough that quotients do not overflow."""
    return options.soft_cap or (options.scale if options.scale > 1e-6 else 1.0)


class MaskArrays(NamedTuple):
    """Inputs of a kernel besides q, k and v."""

    ids: Int32[Array, "batch queries"] | None
    kv_ids: Int32[Array, "batch keys"] | None
    ranges: Int32[Array, "batch blocks 4"]  # for each block of the kernel, the blocks to visit, as in `block_ranges`


# Block sizes of each pass: (largest bytes per element, largest head_dim) -> sizes. They fit every GPU from Ampere on: a
# forward block stores (queries + 2 x keys x stages) x head_dim elements in shared memory, of which a consumer GPU has
# 99 KB; d_keys keeps two sums of keys x head_dim in registers, which would spill with larger blocks of queries.
BLOCKS = {
    "forward": {
        (2, 64): BlockSizes(128, 64, 8, 3),
        (2, 128): BlockSizes(128, 64, 8, 2),
        (2, 256): BlockSizes(64, 32, 8, 2),
        (4, 64): BlockSizes(32, 32, 4, 2),
        (4, 256): BlockSizes(32, 16, 4, 2),
    },
    "d_queries": {
        (2, 64): BlockSizes(64, 64, 4, 2),
        (2, 128): BlockSizes(64, 64, 8, 1),
        (2, 256): BlockSizes(32, 32, 4, 1),
        (4, 128): BlockSizes(32, 32, 4, 1),
        (4, 256): BlockSizes(16, 16, 4, 1),
    },
    "d_keys": {
        (2, 64): BlockSizes(32, 128, 8, 2),
        (2, 128): BlockSizes(32, 64, 8, 1),
        (2, 256): BlockSizes(32, 32, 8, 1),
        (4, 128): BlockSizes(32, 32, 4, 1),
        (4, 256): BlockSizes(16, 16, 4, 1),
    },
}


def block_sizes(kernel: str, q: jax.Array, k: jax.Array) -> BlockSizes:
    """The block sizes of a kernel, a key of BLOCKS."""
    table = BLOCKS[kernel]
    wide = next_power_of_2(q.shape[3])
    most = table[min(key for key in table if key >= (q.dtype.itemsize, wide))]
    return most._replace(queries=block_size(most.queries, q.shape[1]), keys=block_size(most.keys, k.shape[1]))


def backward_rows(saved: Residuals, d_out: jax.Array, options: Options) -> tuple[jax.Array, jax.Array]:
    """Two values for each row: its log-sum-exp in units of the scores, and `inner`: d(loss)/d(score) = p (dp - inner),
    where inner is the dot product of output and cotangent. In a row without keys p = exp(-inf) = 0, if its log-sum-exp
    of -inf is replaced."""
    lse = jnp.where(jnp.isneginf(saved.lse), 0.0, saved.lse / score_unit(options))
    return lse, row_products(saved.out, d_out)


def mask_arrays(
    options: Options, blocks: BlockSizes, extras: Extras, q: jax.Array, k: jax.Array, *, by_keys: bool
) -> MaskArrays:
    sizes = blocks.queries, blocks.keys
    table = block_ranges(options, q.shape[1], k.shape[1], sizes, by_keys=by_keys)
    ids = extras.segment_ids
    kv_ids = extras.kv_segment_ids
    if ids is None or kv_ids is None:
        return MaskArrays(None, None, jnp.broadcast_to(table, (q.shape[0], *table.shape)))
    mine = _id_range(ids, blocks.queries)
    theirs = _id_range(kv_ids, blocks.keys)
    (low, high), (other_low, other_high) = (theirs, mine) if by_keys else (mine, theirs)
    meets = (low[:, :, None] <= other_high[:, None]) & (other_low[:, None] <= high[:, :, None])
    begin = jnp.argmax(meets, axis=2).astype(jnp.int32)
    end = meets.shape[2] - jnp.argmax(meets[:, :, ::-1], axis=2).astype(jnp.int32)
    end = jnp.minimum(jnp.where(jnp.any(meets, axis=2), end, 0), table[:, 3])
    return MaskArrays(ids, kv_ids, jnp.stack([jnp.maximum(begin, table[:, 0]), end, end, end], axis=2))


def _id_range(ids: jax.Array, block: int) -> tuple[jax.Array, jax.Array]:
    """The lowest and the highest id in each block."""
    padded = jnp.pad(ids, ((0, 0), (0, -ids.shape[1] % block)), mode="edge").reshape(ids.shape[0], -1, block)
    return jnp.min(padded, axis=2), jnp.max(padded, axis=2)
