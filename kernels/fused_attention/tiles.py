"""Tiles of the score matrix: the ranges that are not masked, and the computation of one tile.

Queries are grouped by the key head that they share, [batch, kv_heads, group, queries, dim]; keys and values are [batch,
kv_heads, keys, dim]. The queries of a group are rows of one matmul, so grouped-query attention copies nothing.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from .arguments import Extras, Options, visible

Queries = Float[Array, "batch kv_heads group queries dim"]
Outputs = Float[Array, "batch queries kv_heads group dim"]
Keys = Float[Array, "batch kv_heads keys dim"]
Turned = Float[Array, "batch kv_heads dim keys"]
Rows = Float[Array, "batch kv_heads group queries"]
Scores = Float[Array, "batch kv_heads a b c"]


class Tile(NamedTuple):
    """The first query and first key, which are traced, and the numbers of both."""

    query: Any
    queries: int
    key: Any
    keys: int


class Order(NamedTuple):
    """The dimensions of a tile's scores, after batch and kv_heads."""

    query: int
    key: int


FORWARD = Order(query=3, key=4)  # sums over keys are along the last dimension
BACKWARD = Order(query=4, key=2)  # keys are rows, as the matmuls of dk and dv read them


class Problem(NamedTuple):
    """The properties of a call that its tiles share."""

    options: Options
    extras: Extras
    queries: int
    keys: int

    @property
    def offset(self) -> int:
        """Query q is at the position of key q + offset."""
        return self.keys - self.queries

    def keys_seen(self, first: int, last: int) -> tuple[int, int]:
        """The range of keys that the queries first..last-1 attend to."""
        o, low, high = self.options, 0, self.keys
        if o.causal or o.window is not None:
            high = min(high, last + self.offset)
        if o.window is not None:
            low = max(low, first + self.offset - o.window + 1)
        return low, max(low, high)

    def queries_seeing(self, first: int, last: int) -> tuple[int, int]:
        """The range of queries that attend to the keys first..last-1."""
        o, low, high = self.options, 0, self.queries
        if o.causal or o.window is not None:
            low = max(low, first - self.offset)
        if o.window is not None:
            high = min(high, last - self.offset + o.window - 1)
        return low, max(low, high)


def scores(problem: Problem, q: Queries, k: Keys, tile: Tile, order: Order) -> tuple[Scores, Any]:
    """The scores of a tile in float32, -inf where they are masked; and the slope d(score)/d(q . k)."""
    options = problem.options
    rows = merge_groups(q)
    if order is FORWARD:
        s = jnp.einsum("bnqd,bnkd->bnqk", rows, k, preferred_element_type=jnp.float32).reshape(*q.shape[:4], -1)
    else:
        s = jnp.einsum("bnkd,bnqd->bnkq", k, rows, preferred_element_type=jnp.float32).reshape(
            *k.shape[:3], *q.shape[2:4]
        )
    s = s * options.scale
    slope: Any = options.scale
    if options.soft_cap is not None:
        capped_scores = jnp.tanh(s / options.soft_cap)
        s, slope = capped_scores * options.soft_cap, options.scale * (1.0 - capped_scores * capped_scores)
    seen = _seen(problem, tile, order)
    return (s if seen is None else jnp.where(seen, s, -jnp.inf)), slope


def merge_groups(q: Queries) -> Keys:
    """The queries of a group as rows of one matrix."""
    return q.reshape(*q.shape[:2], -1, q.shape[-1])


def tile_forward(problem: Problem, tile: Tile, q: Queries, k: Keys, v: Keys, before: Any) -> tuple[Any, ...]:
    """The weighted sum of values, the maximum and the sum of each row, combined with the results `before` of other
    tiles."""
    s, _ = scores(problem, q, k, tile, FORWARD)
    top = jnp.maximum(jnp.max(s, axis=-1), before[1])
    finite = jnp.where(jnp.isneginf(top), 0.0, top)  # a row without visible keys so far has -inf
    p = jnp.exp(s - finite[..., None])
    total = jnp.sum(p, axis=-1)
    p = p.astype(v.dtype).reshape(*q.shape[:2], -1, tile.keys)
    mixed = jnp.einsum("bnqk,bnkd->bnqd", p, v, preferred_element_type=jnp.float32).reshape(q.shape)
    shrink = jnp.exp(before[1] - finite)
    return mixed + before[0] * shrink[..., None], top, total + before[2] * shrink


def finished(like: jax.Array, mixed: jax.Array, top: Rows, total: Rows) -> tuple[Queries, Rows]:
    seen = total > 0.0
    out = mixed / jnp.where(seen, total, 1.0)[..., None]
    lse = jnp.where(seen, top + jnp.log(jnp.where(seen, total, 1.0)), -jnp.inf)
    return out.astype(like.dtype), lse


def tile_backward(
    problem: Problem, tile: Tile, q: Queries, k: Keys, k_turned: Turned, v: Keys, d_out: Queries, lse: Rows, inner: Rows
) -> tuple[Any, ...]:
    """A tile's part of dq, [batch, kv_heads, dim, group, queries], of dk and of dv. Every matmul contracts the last
    dimension of its left side, which is fast on CPUs. `k_turned`: the transposed keys, for the matmul of dq."""
    batch, heads, groups, queries, dim = q.shape
    shape = (batch, heads, tile.keys, groups * queries)
    s, slope = scores(problem, q, k, tile, BACKWARD)
    p = jnp.exp(s - lse[:, :, None])
    rows = merge_groups(d_out)
    dv = jnp.einsum("bnkq,bnqd->bnkd", p.astype(v.dtype).reshape(shape), rows, preferred_element_type=jnp.float32)
    dp = jnp.einsum("bnkd,bnqd->bnkq", v, rows, preferred_element_type=jnp.float32).reshape(p.shape)
    ds = p * (dp - inner[:, :, None]) * slope
    ds = ds.astype(q.dtype).reshape(shape)
    dk = jnp.einsum("bnkq,bnqd->bnkd", ds, merge_groups(q), preferred_element_type=jnp.float32)
    dq = jnp.einsum("bndk,bnkq->bndq", k_turned, ds, preferred_element_type=jnp.float32)
    return dq.reshape(batch, heads, dim, groups, queries), dk, dv


def _seen(problem: Problem, tile: Tile, order: Order) -> Bool[Array, "..."] | None:
    options, extras = problem.options, problem.extras
    query, key = _positions(tile.query, tile.queries), _positions(tile.key, tile.keys)
    at_query, at_key = _along(query, (order.query,)), _along(key, (order.key,))
    parts = [visible(at_query, at_key, offset=problem.offset, causal=options.causal, window=options.window)]
    if problem.keys % tile.keys:
        parts.append(at_key < problem.keys)  # the last tile of the loop extends beyond the keys
    if extras.segment_ids is not None and extras.kv_segment_ids is not None:
        mine = jax.lax.dynamic_slice_in_dim(extras.segment_ids, tile.query, tile.queries, axis=1)
        theirs = jax.lax.dynamic_slice_in_dim(extras.kv_segment_ids, tile.key, tile.keys, axis=1)
        parts.append(_along(mine, (0, order.query)) == _along(theirs, (0, order.key)))
    seen = None
    for part in parts:
        seen = part if seen is None or part is None else seen & part
    return seen


def _positions(first: Any, count: int) -> jax.Array:
    return first + jnp.arange(count, dtype=jnp.int32)


def _along(x: jax.Array, dims: tuple[int, ...]) -> jax.Array:
    """`x` with its dimensions at these positions of a tile's five dimensions, to broadcast over the others."""
    shape = [1] * 5
    for dim, length in zip(dims, x.shape, strict=True):
        shape[dim] = length
    return x.reshape(shape)
