"""The common part of the fused implementations: the call of their kernels, and its gradient.

One kernel computes the output and the log-sum-exp of each row. In the backward pass one kernel computes dq and another
kernel dk and dv, or one kernel computes all three. Packed sequences have sorted segment ids, so kernels can skip
complete blocks; the blocks to visit are computed here.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxmem.kernels.launch import block_size, next_power_of_2

from .arguments import Extras, Options, pairs, visible

LOG2E = math.log2(math.e)


class BlockSizes(NamedTuple):
    """Block sizes of a kernel: powers of two, at least 16 for the tensor cores."""

    queries: int
    keys: int
    warps: int
    stages: int


class AttentionCall(NamedTuple):
    """Compile-time properties of a call."""

    options: Options
    queries: int
    keys: int
    dim: int
    blocks: BlockSizes

    @property
    def offset(self) -> int:
        return self.keys - self.queries

    @property
    def pairs(self) -> int:
        """The number of (query, key) pairs that are not masked; segments are ignored."""
        return pairs(self.queries, self.keys, causal=self.options.causal, window=self.options.window)

    @property
    def wide(self) -> int:
        """`dim`, rounded up to a power of two."""
        return next_power_of_2(self.dim)

    @property
    def unit(self) -> float:
        """The unit of the scores that `capped_scores` returns."""
        o = self.options
        return o.soft_cap or (o.scale if _is_unit(o.scale) else 1.0)


class MaskArrays(NamedTuple):
    """Inputs of a kernel besides q, k and v: arrays outside of the kernel, references inside."""

    ids: Any = None
    kv_ids: Any = None
    begin: Any = None  # for each block of the kernel, the first block to visit that shares a segment with it
    end: Any = None  # for each block of the kernel, the end of the blocks to visit


def capped_scores(
    call: AttentionCall, raw: jax.Array, tanh: Callable[[jax.Array], jax.Array] = jnp.tanh
) -> tuple[jax.Array, jax.Array | None]:
    """Scores in units of `call.unit`, and the derivative of soft-capping. Differences of scores are computed before
    they are multiplied by the unit, so they are as exact for scores of 10,000 as for small scores."""
    o = call.options
    if o.soft_cap is None:
        return (raw if _is_unit(o.scale) else raw * o.scale), None
    capped = tanh(raw * (o.scale / o.soft_cap))
    return capped, 1.0 - capped * capped


def _is_unit(scale: float) -> bool:
    """Whether the scale can be the unit. It must be positive, so that the largest dot product has the largest score,
    and large enough that quotients do not overflow."""
    return scale > 1e-6


def seen_in_block(call: AttentionCall, query: jax.Array, key: jax.Array, mine: Any, theirs: Any) -> jax.Array:
    """Whether each query of a tile attends to each key."""
    seen = key < call.keys
    near = visible(query, key, offset=call.offset, causal=call.options.causal, window=call.options.window)
    if near is not None:
        seen &= near
    return seen if mine is None else seen & (mine == theirs)


# ---------------------------------------------------------------- the blocks that a program visits (Mosaic)


class BlockRange(NamedTuple):
    """Consecutive blocks, and whether some of their elements are masked."""

    start: Any
    stop: Any
    masked: bool


def loop_over(ranges: list[BlockRange], visit: Callable[..., Any], state: Any) -> Any:
    for start, stop, masked in ranges:
        state = jax.lax.fori_loop(start, stop, functools.partial(visit, masked=masked), state)
    return state


def visited_blocks(call: AttentionCall, block: jax.Array, masks: MaskArrays, *, by_keys: bool) -> list[BlockRange]:
    """The blocks of keys that are not completely masked for this block of queries; with `by_keys`, the blocks of
    queries for this block of keys. Three ranges: partly masked blocks, unmasked blocks, partly masked blocks."""
    o, window = call.options, call.options.window
    back = None if window is None else window - 1
    causal = 0 if o.causal or window is not None else None
    # A position p of this block is visible from (or sees) the positions p + shift + below to p + shift + above.
    if by_keys:
        own, size, length, shift = call.blocks.keys, call.blocks.queries, call.queries, -call.offset
        below, above = causal, back
    else:
        own, size, length, shift = call.blocks.queries, call.blocks.keys, call.keys, call.offset
        below, above = None if back is None else -back, causal
    first = block * own + shift
    last = first + own - 1
    low = unmasked_low = jnp.int32(0)
    high: Any = jnp.int32(length)
    # Rows beyond the end of the last block of queries add zero, so this block needs no mask.
    unmasked_high: Any = jnp.int32(-(-length // size) * size if by_keys else length)
    if below is not None:
        low, unmasked_low = jnp.maximum(first + below, 0), jnp.maximum(last + below, 0)
    if above is not None:
        high, unmasked_high = jnp.clip(last + above + 1, 0, length), jnp.clip(first + above + 1, 0, length)
    begin, end = _div(low, size), _div(high + size - 1, size)
    if masks.begin is not None:
        begin = jnp.maximum(begin, masks.begin[block])
        end = jnp.minimum(end, masks.end[block])
        return [BlockRange(begin, end, True)]
    unmasked_begin = jnp.clip(_div(unmasked_low + size - 1, size), begin, jnp.maximum(begin, end))
    unmasked_end = jnp.clip(_div(unmasked_high, size), unmasked_begin, jnp.maximum(unmasked_begin, end))
    has_last = above is not None or (not by_keys and length % size > 0)
    before, after = [BlockRange(begin, unmasked_begin, True)], [BlockRange(unmasked_end, end, True)]
    return [*before[: below is not None], BlockRange(unmasked_begin, unmasked_end, False), *after[:has_last]]


def _div(x: Any, size: int) -> jax.Array:
    return jax.lax.div(x, jnp.int32(size))


# Block sizes of each pass: (largest bytes per element, largest head_dim) -> sizes. They fit every GPU from Ampere on: a
# forward block stores (queries + 2 x keys x stages) x head_dim elements in shared memory, of which a consumer GPU has
# 99 KB; d_keys keeps two sums of keys x head_dim in registers, which would spill with larger blocks of queries.
BLOCKS = {
    ("triton", "forward"): {
        (2, 64): BlockSizes(128, 64, 8, 3),
        (2, 128): BlockSizes(128, 64, 8, 2),
        (2, 256): BlockSizes(64, 32, 8, 2),
        (4, 64): BlockSizes(32, 32, 4, 2),
        (4, 256): BlockSizes(32, 16, 4, 2),
    },
    ("triton", "d_queries"): {
        (2, 64): BlockSizes(64, 64, 4, 2),
        (2, 128): BlockSizes(64, 64, 8, 1),
        (2, 256): BlockSizes(32, 32, 4, 1),
        (4, 128): BlockSizes(32, 32, 4, 1),
        (4, 256): BlockSizes(16, 16, 4, 1),
    },
    ("triton", "d_keys"): {
        (2, 64): BlockSizes(32, 128, 8, 2),
        (2, 128): BlockSizes(32, 64, 8, 1),
        (2, 256): BlockSizes(32, 32, 8, 1),
        (4, 128): BlockSizes(32, 32, 4, 1),
        (4, 256): BlockSizes(16, 16, 4, 1),
    },
    # The two computing warpgroups of `mosaic` are 8 warps.
    ("mosaic", "forward"): {
        (2, 64): BlockSizes(128, 128, 8, 3),
        (2, 128): BlockSizes(128, 128, 8, 2),
        (2, 256): BlockSizes(128, 64, 8, 2),
    },
    ("mosaic", "gradients"): {(2, 128): BlockSizes(64, 128, 8, 2)},
}


class Passes(NamedTuple):
    """The kernels of an implementation."""

    name: str
    forward: Callable[..., tuple[jax.Array, jax.Array]]  # call, q, k, v, masks -> out, lse
    # call, q, k, v, d_out, rows, masks -> dq, dk, dv, whose order of additions differs between runs; None: two kernels.
    one_pass: Callable[..., tuple[jax.Array, jax.Array, jax.Array]] | None = None
    d_queries: Callable[..., jax.Array] | None = None  # the same arguments -> dq
    d_keys: Callable[..., tuple[jax.Array, jax.Array]] | None = None  # the same arguments -> dk, dv
    two_kernels: Any = None  # the Passes whose d_queries and d_keys are used; None: these Passes
    min_block: int = 16  # least number of positions of a block


def attend(
    passes: Passes, q: jax.Array, k: jax.Array, v: jax.Array, options: Options, extras: Extras
) -> tuple[jax.Array, jax.Array]:
    """Output and log-sum-exp."""
    call = _call(passes, "forward", options, q, k)
    return passes.forward(call, q, k, v, _mask_arrays(call, extras, by_keys=False))


def gradients(
    passes: Passes,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    d_out: jax.Array,
    d_lse: jax.Array | None,
    options: Options,
    extras: Extras,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    # d(loss)/d(score) = p (dp - inner), where inner is the dot product of output and cotangent of a row, minus the
    # cotangent of the log-sum-exp. In a row without keys p = exp(-inf) = 0, if its log-sum-exp of -inf is replaced.
    inner = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1).swapaxes(1, 2)
    inner = inner if d_lse is None else inner - d_lse
    one_pass = None if options.deterministic else passes.one_pass
    passes = passes if one_pass else passes.two_kernels or passes
    call = _call(passes, "gradients" if one_pass else "d_queries", options, q, k)
    rows = jnp.where(jnp.isneginf(lse), 0.0, lse / call.unit), inner
    arrays = q, k, v, d_out, rows
    if one_pass is not None:
        return one_pass(call, *arrays, _mask_arrays(call, extras, by_keys=True))
    assert passes.d_queries is not None and passes.d_keys is not None  # noqa: PT018
    dq = passes.d_queries(call, *arrays, _mask_arrays(call, extras, by_keys=False))
    call = _call(passes, "d_keys", options, q, k)
    dk, dv = passes.d_keys(call, *arrays, _mask_arrays(call, extras, by_keys=True))
    return dq, dk, dv


def _mask_arrays(call: AttentionCall, extras: Extras, *, by_keys: bool) -> MaskArrays:
    if extras.segment_ids is None or extras.kv_segment_ids is None:
        return MaskArrays()
    mine, theirs = _reach(extras.segment_ids, call.blocks.queries), _reach(extras.kv_segment_ids, call.blocks.keys)
    if by_keys:
        mine, theirs = theirs, mine
    (low, high), (other_low, other_high) = mine, theirs
    meets = (low[:, :, None] <= other_high[:, None]) & (other_low[:, None] <= high[:, :, None])
    count = meets.shape[2]
    begin = jnp.argmax(meets, axis=2).astype(jnp.int32)
    end = count - jnp.argmax(meets[:, :, ::-1], axis=2).astype(jnp.int32)
    end = jnp.where(jnp.any(meets, axis=2), end, 0)
    return MaskArrays(extras.segment_ids, extras.kv_segment_ids, begin, end)


def _reach(ids: jax.Array, block: int) -> tuple[jax.Array, jax.Array]:
    """The lowest and the highest id in each block."""
    padded = jnp.pad(ids, ((0, 0), (0, -ids.shape[1] % block)), mode="edge").reshape(ids.shape[0], -1, block)
    return jnp.min(padded, axis=2), jnp.max(padded, axis=2)


def _call(passes: Passes, of: str, options: Options, q: jax.Array, k: jax.Array) -> AttentionCall:
    table, wide = BLOCKS[passes.name, of], next_power_of_2(q.shape[3])
    most = table[min(key for key in table if key >= (q.dtype.itemsize, wide))]
    fitted = most._replace(
        queries=block_size(most.queries, q.shape[1], passes.min_block),
        keys=block_size(most.keys, k.shape[1], passes.min_block),
    )
    return AttentionCall(options, q.shape[1], k.shape[1], q.shape[3], fitted)
