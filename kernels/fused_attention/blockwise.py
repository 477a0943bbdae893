"""Attention in plain JAX, one tile of scores at a time, for every device of XLA.

A tile is a block of queries of every head by a block of keys. The forward pass keeps a running maximum and sum of each
row (Milakov and Gimelshein, arXiv:1805.02867; Rabe and Staats, arXiv:2112.05682) and skips completely masked tiles. It
saves the output and the log-sum-exp of each row, from which the backward pass computes the probabilities of each tile
(Dao et al., arXiv:2205.14135).

With P unmasked (query, key) pairs it needs 4 P dim operations per head forward and 10 P dim backward. In addition to
inputs and outputs it stores batch x heads x (a few tiles + a few times sequence x dim) values, never sequence squared.
Batch and heads remain separate dimensions, so arrays that are sharded over them are not moved.

Queries are grouped by the key head that they share, [batch, kv_heads, group, queries, dim]; keys and values are [batch,
kv_heads, keys, dim]. The queries of a group are rows of one matmul, so grouped-query attention copies nothing.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from jaxmem.kernels.typing import Index, Tree

from .arguments import Extras, KeyHeads, LogSumExp, Options, QueryHeads, Residuals, visible
from .flash import block_ranges

Queries = Float[Array, "batch kv_heads group queries dim"]
Keys = Float[Array, "batch kv_heads keys dim"]
KeysTransposed = Float[Array, "batch kv_heads dim keys"]
Rows = Float[Array, "batch kv_heads group queries"]
Tile = tuple[Index, Index]  # the indices of its first query and of its first key

# A loop runs over tiles of at most this many queries and keys, so the program does not grow with the sequence. With
# smaller tiles more of a causal mask is skipped: on a CPU, a sequence of 256 takes a third of the time with tiles of
# SHORT_BLOCK.
BLOCK, SHORT_BLOCK = 256, 128
SHORT = 2048  # positions up to which SHORT_BLOCK is faster


class Problem(NamedTuple):
    """The properties of a call that its tiles share. Segment ids are padded to complete blocks."""

    options: Options
    extras: Extras
    queries: int
    keys: int
    block_q: int  # queries and keys of a tile
    block_k: int

    @classmethod
    def of(cls, q: QueryHeads, k: KeyHeads, options: Options, extras: Extras) -> Problem:
        block_q = _block(q.shape[1])
        block_k = _block(k.shape[1])
        if extras.segment_ids is not None and extras.kv_segment_ids is not None:
            ids = _padded(extras.segment_ids, 1, block_q)
            kv_ids = _padded(extras.kv_segment_ids, 1, block_k)
            extras = extras._replace(segment_ids=ids, kv_segment_ids=kv_ids)
        return cls(options, extras, q.shape[1], k.shape[1], block_q, block_k)

    @property
    def offset(self) -> int:
        """Query q is at the position of key q + offset."""
        return self.keys - self.queries

    def by_query(self, q: QueryHeads, kv_heads: int) -> Float[Array, "batch kv_heads group padded dim"]:
        """Queries in groups, padded to complete blocks."""
        grouped = q.reshape(*q.shape[:2], kv_heads, q.shape[2] // kv_heads, q.shape[3]).transpose(0, 2, 3, 1, 4)
        return _padded(grouped, 3, self.block_q)

    def by_key(self, k: KeyHeads) -> Float[Array, "batch kv_heads padded dim"]:
        """Keys or values, padded to complete blocks."""
        return _padded(k.transpose(0, 2, 1, 3), 2, self.block_k)


def attend(q: QueryHeads, k: KeyHeads, v: KeyHeads, options: Options, extras: Extras) -> tuple[QueryHeads, LogSumExp]:
    """Output and log-sum-exp."""
    problem = Problem.of(q, k, options, extras)
    queries = problem.by_query(q, k.shape[2])
    keys = problem.by_key(k)
    values = problem.by_key(v)
    block_q, block_k = problem.block_q, problem.block_k

    def visit(i: Index, j: Index, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        before = tuple(_slice(x, i, block_q, 3) for x in state)
        blocks = _slice(queries, i, block_q, 3), _slice(keys, j, block_k, 2), _slice(values, j, block_k, 2)
        after = _tile_forward(problem, (i, j), *blocks, before)
        return tuple(_put(x, part, i, 3) for x, part in zip(state, after, strict=True))

    rows = queries.shape[:-1]
    start = jnp.zeros(queries.shape, jnp.float32), jnp.full(rows, -jnp.inf, jnp.float32), jnp.zeros(rows, jnp.float32)
    mixed, top, total = _visit_tiles(problem, visit, start)
    seen = total > 0.0
    total = jnp.where(seen, total, 1.0)
    out = (mixed / total[..., None]).astype(q.dtype)[..., : problem.queries, :]
    lse = jnp.where(seen, top + jnp.log(total), -jnp.inf)[..., : problem.queries]
    return out.transpose(0, 3, 1, 2, 4).reshape(q.shape), lse.reshape(q.shape[0], q.shape[2], q.shape[1])


def gradients(
    saved: Residuals, d_out: QueryHeads, options: Options, extras: Extras
) -> tuple[QueryHeads, KeyHeads, KeyHeads]:
    q, k, v, out, lse = saved
    kv_heads = k.shape[2]
    problem = Problem.of(q, k, options, extras)
    block_q, block_k = problem.block_q, problem.block_k
    # d(loss)/d(score) = p (dp - inner), where inner is the dot product of output and cotangent of a row. The log-sum-
    # exp of a row without keys, -inf, is replaced by 0, so that p = exp(-inf) = 0.
    # The sum is a matmul with ones, because a sum of so few numbers takes 15 times as long with XLA:CPU of jax 0.10.
    both = out.astype(jnp.float32) * d_out.astype(jnp.float32)
    ones = jnp.ones(out.shape[-1:], jnp.float32)
    inner = jnp.matmul(both, ones, precision=jax.lax.Precision.HIGHEST).swapaxes(1, 2)
    lse, inner = (
        _padded(x.reshape(x.shape[0], kv_heads, -1, x.shape[2]), 3, block_q)
        for x in (jnp.where(jnp.isneginf(lse), 0.0, lse), inner)
    )
    queries = problem.by_query(q, kv_heads)
    cotangents = problem.by_query(d_out, kv_heads)
    keys = problem.by_key(k)
    values = problem.by_key(v)
    keys_transposed = jnp.swapaxes(keys, 2, 3)

    def visit(j: Index, i: Index, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        rows = _slice(cotangents, i, block_q, 3), _slice(lse, i, block_q, 3), _slice(inner, i, block_q, 3)
        blocks = (
            _slice(queries, i, block_q, 3),
            _slice(keys, j, block_k, 2),
            _slice(keys_transposed, j, block_k, 3),
            _slice(values, j, block_k, 2),
        )
        parts = _tile_backward(problem, (i, j), *blocks, rows)
        places = (i, block_q, 4), (j, block_k, 2), (j, block_k, 2)
        return tuple(
            _put(x, _slice(x, start, length, dim) + part, start, dim)
            for x, part, (start, length, dim) in zip(state, parts, places, strict=True)
        )

    batch, heads, groups, length, dim = queries.shape
    start = (
        jnp.zeros((batch, heads, dim, groups, length), jnp.float32),
        jnp.zeros(keys.shape, jnp.float32),
        jnp.zeros(values.shape, jnp.float32),
    )
    dq, dk, dv = _visit_tiles(problem, visit, start, by_keys=True)
    dq = dq[..., : problem.queries].transpose(0, 4, 1, 3, 2).reshape(q.shape)
    return dq, *(x[:, :, : problem.keys].transpose(0, 2, 1, 3) for x in (dk, dv))


def _block(length: int) -> int:
    """The size of equal blocks that need little padding at the end."""
    count = -(-length // (SHORT_BLOCK if length <= SHORT else BLOCK))
    return min(length, 8 * -(-length // (8 * count)))


def _visit_tiles(problem: Problem, visit: Callable[..., Any], state: Tree, *, by_keys: bool = False) -> Tree:
    """Calls `visit(first, other, state)` for every tile that is not completely masked. `first` is the start of a block
    of queries and `other` the start of a block of keys; with `by_keys` it is the reverse. The loop carries the
    positions, since a table of all tiles would grow with the square of the sequence."""
    blocks = problem.block_q, problem.block_k
    size, step = blocks[::-1] if by_keys else blocks
    ranges = block_ranges(problem.options, problem.queries, problem.keys, blocks, by_keys=by_keys)
    lines = np.stack([size * np.arange(len(ranges), dtype=np.int32), step * ranges[:, 0], step * ranges[:, 3]], axis=1)
    lines = lines[lines[:, 1] < lines[:, 2]]
    if not len(lines):
        return state
    table = jnp.asarray(np.concatenate([lines, lines[-1:]]))

    def next_tile(_: Any, carried: tuple[jax.Array, jax.Array, Tree]) -> tuple[jax.Array, jax.Array, Tree]:
        line, other, state = carried
        state = visit(table[line, 0], other, state)
        is_last = other + step >= table[line, 2]
        line = line + is_last.astype(jnp.int32)
        return line, jnp.where(is_last, table[line, 1], other + step), state

    count = int((lines[:, 2] - lines[:, 1]).sum()) // step
    return jax.lax.fori_loop(0, count, next_tile, (jnp.int32(0), table[0, 1], state))[2]


def _padded(x: jax.Array, dim: int, block: int) -> jax.Array:
    short = -x.shape[dim] % block
    return x if short == 0 else jnp.pad(x, [(0, short if d == dim else 0) for d in range(x.ndim)])


def _slice(x: jax.Array, start: Index, length: int, dim: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, start, length, dim)


def _put(x: jax.Array, part: jax.Array, start: Index, dim: int) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(x, part, start, dim)


# ---------------------------------------------------------------- one tile


def _scores(problem: Problem, q: Queries, k: Keys, tile: Tile, *, by_keys: bool = False) -> tuple[jax.Array, Tree]:
    """The scores of a tile in float32, -inf where they are masked, [batch, kv_heads, group, queries, keys]; with
    `by_keys` [batch, kv_heads, keys, group, queries], as the matmuls of dk and dv read them. Also the slope
    d(score)/d(q . k)."""
    options = problem.options
    rows = _merge_groups(q)
    if by_keys:
        s = jnp.einsum("bnkd,bnqd->bnkq", k, rows, preferred_element_type=jnp.float32)
        s = s.reshape(*k.shape[:3], *q.shape[2:4])
    else:
        s = jnp.einsum("bnqd,bnkd->bnqk", rows, k, preferred_element_type=jnp.float32).reshape(*q.shape[:4], -1)
    s = s * options.scale
    slope: Any = options.scale
    if options.soft_cap is not None:
        capped = jnp.tanh(s / options.soft_cap)
        s = capped * options.soft_cap
        slope = options.scale * (1.0 - capped * capped)
    seen = _seen(problem, tile, by_keys=by_keys)
    return (s if seen is None else jnp.where(seen, s, -jnp.inf)), slope


def _merge_groups(q: Queries) -> Keys:
    """The queries of a group as rows of one matrix."""
    return q.reshape(*q.shape[:2], -1, q.shape[-1])


def _tile_forward(problem: Problem, tile: Tile, q: Queries, k: Keys, v: Keys, before: Any) -> tuple[Tree, ...]:
    """The weighted sum of values, the maximum and the sum of each row, combined with the results `before` of other
    tiles."""
    s, _ = _scores(problem, q, k, tile)
    top = jnp.maximum(jnp.max(s, axis=-1), before[1])
    finite = jnp.where(jnp.isneginf(top), 0.0, top)  # a row without visible keys so far has -inf
    p = jnp.exp(s - finite[..., None])
    total = jnp.sum(p, axis=-1)
    p = p.astype(v.dtype).reshape(*q.shape[:2], -1, problem.block_k)
    mixed = jnp.einsum("bnqk,bnkd->bnqd", p, v, preferred_element_type=jnp.float32).reshape(q.shape)
    shrink = jnp.exp(before[1] - finite)
    return mixed + before[0] * shrink[..., None], top, total + before[2] * shrink


def _tile_backward(
    problem: Problem,
    tile: Tile,
    q: Queries,
    k: Keys,
    k_transposed: KeysTransposed,
    v: Keys,
    rows: tuple[Queries, Rows, Rows],
) -> tuple[Tree, ...]:
    """A tile's part of dq, [batch, kv_heads, dim, group, queries], of dk and of dv. Every matmul contracts the last
    dimension of its left side, which is fast on CPUs. `k_transposed` is for the matmul of dq. `rows`: the
    cotangent, the log-sum-exp and `inner` (`flash.backward_rows`) of each row."""
    d_out, lse, inner = rows
    batch, heads, groups, queries, dim = q.shape
    shape = (batch, heads, problem.block_k, groups * queries)
    s, slope = _scores(problem, q, k, tile, by_keys=True)
    p = jnp.exp(s - lse[:, :, None])
    merged = _merge_groups(d_out)
    dv = jnp.einsum("bnkq,bnqd->bnkd", p.astype(v.dtype).reshape(shape), merged, preferred_element_type=jnp.float32)
    dp = jnp.einsum("bnkd,bnqd->bnkq", v, merged, preferred_element_type=jnp.float32).reshape(p.shape)
    ds = p * (dp - inner[:, :, None]) * slope
    ds = ds.astype(q.dtype).reshape(shape)
    dk = jnp.einsum("bnkq,bnqd->bnkd", ds, _merge_groups(q), preferred_element_type=jnp.float32)
    dq = jnp.einsum("bndk,bnkq->bndq", k_transposed, ds, preferred_element_type=jnp.float32)
    return dq.reshape(batch, heads, dim, groups, queries), dk, dv


def _seen(problem: Problem, tile: Tile, *, by_keys: bool) -> Bool[Array, "..."] | None:
    """Whether the queries of a tile attend to its keys, to broadcast over scores; None: all do."""

    def along(queries: jax.Array, keys: jax.Array) -> tuple[Tree, ...]:
        """Values of queries and keys, [batch or 1, length], expanded to broadcast over scores."""
        over = ((1, 2, 3), (1, 3, 4)) if by_keys else ((1, 2, 4), (1, 2, 3))
        return tuple(jnp.expand_dims(x, dims) for x, dims in zip((queries, keys), over, strict=True))

    options = problem.options
    extras = problem.extras
    first_query, first_key = tile
    query, key = along(
        first_query + jnp.arange(problem.block_q, dtype=jnp.int32)[None],
        first_key + jnp.arange(problem.block_k, dtype=jnp.int32)[None],
    )
    parts = [visible(query, key, offset=problem.offset, causal=options.causal, window=options.window)]
    if problem.keys % problem.block_k:
        parts.append(key < problem.keys)  # the last tile of the loop extends beyond the keys
    if extras.segment_ids is not None and extras.kv_segment_ids is not None:
        mine, theirs = along(
            _slice(extras.segment_ids, first_query, problem.block_q, 1),
            _slice(extras.kv_segment_ids, first_key, problem.block_k, 1),
        )
        parts.append(mine == theirs)
    seen = [part for part in parts if part is not None]
    return functools.reduce(operator.and_, seen) if seen else None
