"""Tiles of the score matrix: which ones matter, and the mathematics of one.

Queries come grouped by the key head that they share, [batch, kv_heads, group, queries, dim]; keys and values
as [batch, kv_heads, keys, dim]. Nothing is copied for grouped-query attention: a group's queries are rows of
one matmul.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from .arguments import Extras, Options
from .mask import keep_mask, visible

Queries = Float[Array, "batch kv_heads group queries dim"]
Outputs = Float[Array, "batch queries kv_heads group dim"]
Keys = Float[Array, "batch kv_heads keys dim"]
Turned = Float[Array, "batch kv_heads dim keys"]
Rows = Float[Array, "batch kv_heads group queries"]
Scores = Float[Array, "batch kv_heads a b c"]


class Tile(NamedTuple):
    """First query and first key, which may be traced, and how many of each."""

    query: Any
    queries: int
    key: Any
    keys: int


class Order(NamedTuple):
    """Which dimension of a tile's scores is which; batch and kv_heads come first."""

    group: int
    query: int
    key: int


FORWARD = Order(group=2, query=3, key=4)  # sums over keys run along the last dimension
BACKWARD = Order(group=3, query=4, key=2)  # keys are the rows: the matmuls for dk and dv read the tile as it lies


class Problem(NamedTuple):
    """All that the tiles of one call share."""

    options: Options
    extras: Extras
    queries: int
    keys: int

    @property
    def offset(self) -> int:
        """Query q stands at key q + offset: the diagonals are aligned at the end."""
        return self.keys - self.queries

    def keys_seen(self, first: int, last: int) -> tuple[int, int]:
        """The range of keys outside of which queries first..last-1 see nothing."""
        o, low, high = self.options, 0, self.keys
        if o.causal or o.window is not None:
            high = min(high, last + self.offset)
        if o.window is not None:
            low = max(low, first + self.offset - o.window + 1)
        return low, max(low, high)

    def queries_seeing(self, first: int, last: int) -> tuple[int, int]:
        """The range of queries outside of which none sees keys first..last-1."""
        o, low, high = self.options, 0, self.queries
        if o.causal or o.window is not None:
            low = max(low, first - self.offset)
        if o.window is not None:
            high = min(high, last - self.offset + o.window - 1)
        return low, max(low, high)


def scores(problem: Problem, q: Queries, k: Keys, tile: Tile, order: Order) -> tuple[Scores, Any]:
    """A tile's scores in float32, -inf where nothing is seen; and the slope d(score)/d(q . k)."""
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


def apply_dropout(problem: Problem, p: Scores, tile: Tile, order: Order) -> Scores:
    """Probabilities, or their gradient, after dropout."""
    seed, rate = problem.extras.seed, problem.options.dropout
    if seed is None:
        return p
    batch, heads, groups = p.shape[0], p.shape[1], p.shape[order.group]
    row = jnp.arange(batch * heads * groups, dtype=jnp.int32).reshape(batch, heads, groups)
    keep = keep_mask(
        seed,
        _along(row, (0, 1, order.group)),
        _along(_positions(tile.query, tile.queries), (order.query,)),
        _along(_positions(tile.key, tile.keys), (order.key,)),
        rate,
    )
    return jnp.where(keep, p * (1.0 / (1.0 - rate)), 0.0)


def merge_groups(q: Queries) -> Keys:
    """A group's queries as rows of one matrix."""
    return q.reshape(*q.shape[:2], -1, q.shape[-1])


def _seen(problem: Problem, tile: Tile, order: Order) -> Bool[Array, "..."] | None:
    options, extras = problem.options, problem.extras
    query, key = _positions(tile.query, tile.queries), _positions(tile.key, tile.keys)
    at_query, at_key = _along(query, (order.query,)), _along(key, (order.key,))
    parts = [visible(at_query, at_key, offset=problem.offset, causal=options.causal, window=options.window)]
    if not isinstance(tile.key, int) and problem.keys % tile.keys:
        parts.append(at_key < problem.keys)  # the loop's last tile reaches beyond the keys
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
    """`x` with its dimensions at these places of a tile's five, to broadcast over the others."""
    shape = [1] * 5
    for dim, length in zip(dims, x.shape, strict=True):
        shape[dim] = length
    return x.reshape(shape)
