"""Attention in plain JAX, one tile of scores at a time, for every device of XLA.

A tile is a block of queries of every head by a block of keys. The forward pass keeps a running maximum and sum of each
row (Milakov and Gimelshein, arXiv:1805.02867; Rabe and Staats, arXiv:2112.05682) and skips completely masked tiles. It
saves the output and the log-sum-exp of each row, from which the backward pass computes the probabilities of each tile
(Dao et al., arXiv:2205.14135).

With P unmasked (query, key) pairs it needs 4 P dim operations per head forward and 10 P dim backward. In addition to
inputs and outputs it stores batch x heads x (a few tiles + a few times sequence x dim) values, never sequence squared.
Batch and heads remain separate dimensions, so arrays that are sharded over them are not moved.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int32

from .arguments import Extras, KeyHeads, LogSumExp, Options, QueryHeads
from .tiles import Keys, Problem, Queries, Rows, Tile, finished, tile_backward, tile_forward

# A loop runs over tiles of at most this many queries and keys, so the program does not grow with the sequence. With
# smaller tiles more of a causal mask is skipped: on a CPU a sequence of 256 takes a third of the time of one tile.
BLOCK, SHORT_BLOCK = 256, 128
SHORT = 2048  # positions up to which SHORT_BLOCK is faster


def attend(q: QueryHeads, k: KeyHeads, v: KeyHeads, options: Options, extras: Extras) -> tuple[QueryHeads, LogSumExp]:
    """Output and log-sum-exp."""
    problem = Problem(options, extras, q.shape[1], k.shape[1])
    out, lse = _visit_forward(problem, _grouped(q, k.shape[2]), k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3))
    return out.transpose(0, 3, 1, 2, 4).reshape(q.shape), lse.reshape(q.shape[0], q.shape[2], q.shape[1])


def gradients(
    q: QueryHeads,
    k: KeyHeads,
    v: KeyHeads,
    out: QueryHeads,
    lse: LogSumExp,
    d_out: QueryHeads,
    d_lse: LogSumExp | None,
    options: Options,
    extras: Extras,
) -> tuple[QueryHeads, KeyHeads, KeyHeads]:
    kv_heads = k.shape[2]
    problem = Problem(options, extras, q.shape[1], k.shape[1])
    arrays = _grouped(q, kv_heads), k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3), _grouped(d_out, kv_heads)
    # d(loss)/d(score) = p (dp - inner), where inner is the dot product of output and cotangent of a row, minus the
    # cotangent of the log-sum-exp. In a row without keys p = exp(-inf) = 0, if its log-sum-exp of -inf is replaced.
    # The sum is a matmul with ones, because a sum of so few numbers takes 15 times as long with XLA:CPU of jax 0.10.
    both, ones = out.astype(jnp.float32) * d_out.astype(jnp.float32), jnp.ones(out.shape[-1:], jnp.float32)
    inner = jnp.matmul(both, ones, precision=jax.lax.Precision.HIGHEST).swapaxes(1, 2)
    inner = inner if d_lse is None else inner - d_lse
    rows = (x.reshape(x.shape[0], kv_heads, -1, x.shape[2]) for x in (jnp.where(jnp.isneginf(lse), 0.0, lse), inner))
    dq, dk, dv = _visit_backward(problem, *arrays, *rows)
    return dq.transpose(0, 3, 1, 2, 4).reshape(q.shape), dk.transpose(0, 2, 1, 3), dv.transpose(0, 2, 1, 3)


def _grouped(q: jax.Array, kv_heads: int) -> Queries:
    return q.reshape(*q.shape[:2], kv_heads, q.shape[2] // kv_heads, q.shape[3]).transpose(0, 2, 3, 1, 4)


def _block(length: int) -> int:
    """The size of equal blocks that need little padding at the end."""
    count = -(-length // (SHORT_BLOCK if length <= SHORT else BLOCK))
    return min(length, 8 * -(-length // (8 * count)))


def _lines(length: int, block: int, seen: Callable[[int, int], tuple[int, int]], step: int) -> Int32[np.ndarray, "n 3"]:
    """For each block of queries, its first position and the range of the blocks of keys that are not completely masked.
    With `queries_seeing` as `seen`: for each block of keys, its first position and the range of blocks of queries."""
    ranges = [(first, *seen(first, min(first + block, length))) for first in range(0, length, block)]
    found = [(first, low // step * step, high) for first, low, high in ranges if low < high]
    return np.asarray(found, np.int32).reshape(-1, 3)


def _visit_tiles(lines: Int32[np.ndarray, "n 3"], step: int, visit: Callable[..., Any], state: Any) -> Any:
    """Calls `visit(first, other, state)` for every tile, line by line. The loop carries the positions, since a
    table of all tiles would grow with the square of the sequence."""
    if not len(lines):
        return state
    table = jnp.asarray(np.concatenate([lines, lines[-1:]]))

    def next_tile(_: Any, carried: tuple[jax.Array, jax.Array, Any]) -> tuple[jax.Array, jax.Array, Any]:
        line, other, state = carried
        state = visit(table[line, 0], other, state)
        is_last = other + step >= table[line, 2]
        line = line + is_last.astype(jnp.int32)
        return line, jnp.where(is_last, table[line, 1], other + step), state

    count = int((-(-(lines[:, 2] - lines[:, 1]) // step)).sum())
    return jax.lax.fori_loop(0, count, next_tile, (jnp.int32(0), table[0, 1], state))[2]


def _padded(x: jax.Array, dim: int, block: int) -> jax.Array:
    short = -x.shape[dim] % block
    return x if short == 0 else jnp.pad(x, [(0, short if d == dim else 0) for d in range(x.ndim)])


def _slice(x: jax.Array, start: Any, length: int, dim: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, start, length, dim)


def _put(x: jax.Array, part: jax.Array, start: Any, dim: int) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(x, part, start, dim)


def _visit_forward(problem: Problem, q: Queries, k: Keys, v: Keys) -> tuple[Queries, Rows]:
    block_q, block_k = _block(problem.queries), _block(problem.keys)
    problem, (q, k, v) = _fitted(problem, block_q, block_k, q, k, v)

    def visit(i: Any, j: Any, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        before = tuple(_slice(x, i, block_q, 3) for x in state)
        tile = Tile(i, block_q, j, block_k)
        some = _slice(q, i, block_q, 3), _slice(k, j, block_k, 2), _slice(v, j, block_k, 2)
        after = tile_forward(problem, tile, *some, before)
        return tuple(_put(x, part, i, 3) for x, part in zip(state, after, strict=True))

    rows = q.shape[:-1]
    start = jnp.zeros(q.shape, jnp.float32), jnp.full(rows, -jnp.inf, jnp.float32), jnp.zeros(rows, jnp.float32)
    lines = _lines(problem.queries, block_q, problem.keys_seen, block_k)
    out, lse = finished(q, *_visit_tiles(lines, block_k, visit, start))
    return out[..., : problem.queries, :], lse[..., : problem.queries]


def _visit_backward(
    problem: Problem, q: Queries, k: Keys, v: Keys, d_out: Queries, lse: Rows, inner: Rows
) -> tuple[Any, ...]:
    block_q, block_k = _block(problem.queries), _block(problem.keys)
    problem, (q, k, v) = _fitted(problem, block_q, block_k, q, k, v)
    d_out, lse, inner = (_padded(x, 3, block_q) for x in (d_out, lse, inner))
    k_turned = jnp.swapaxes(k, 2, 3)

    def visit(j: Any, i: Any, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        tile = Tile(i, block_q, j, block_k)
        rows = [_slice(x, i, block_q, 3) for x in (d_out, lse, inner)]
        own = _slice(k, j, block_k, 2), _slice(k_turned, j, block_k, 3), _slice(v, j, block_k, 2)
        parts = tile_backward(problem, tile, _slice(q, i, block_q, 3), *own, *rows)
        places = (i, block_q, 4), (j, block_k, 2), (j, block_k, 2)
        return tuple(
            _put(x, _slice(x, start, length, dim) + part, start, dim)
            for x, part, (start, length, dim) in zip(state, parts, places, strict=True)
        )

    batch, heads, groups, queries, dim = q.shape
    start = (
        jnp.zeros((batch, heads, dim, groups, queries), jnp.float32),
        jnp.zeros(k.shape, jnp.float32),
        jnp.zeros(v.shape, jnp.float32),
    )
    lines = _lines(problem.keys, block_k, problem.queries_seeing, block_q)
    dq, dk, dv = _visit_tiles(lines, block_q, visit, start)
    return dq.transpose(0, 1, 3, 4, 2)[:, :, :, : problem.queries], dk[:, :, : problem.keys], dv[:, :, : problem.keys]


def _fitted(
    problem: Problem, block_q: int, block_k: int, q: jax.Array, k: jax.Array, v: jax.Array
) -> tuple[Problem, tuple[jax.Array, jax.Array, jax.Array]]:
    """Arrays and segment ids, padded to complete blocks; the problem keeps the original lengths."""
    mine, theirs = problem.extras[:2]
    if mine is not None and theirs is not None:
        mine, theirs = _padded(mine, 1, block_q), _padded(theirs, 1, block_k)
    problem = problem._replace(extras=problem.extras._replace(segment_ids=mine, kv_segment_ids=theirs))
    return problem, (_padded(q, 3, block_q), _padded(k, 2, block_k), _padded(v, 2, block_k))
