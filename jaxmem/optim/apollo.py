"""APOLLO: the gradient itself, each column scaled as Adam would scale it (Zhu et al., arXiv:2412.05270).

How much Adam would scale a column is read off a random projection of the gradient to `rank` rows: Adam runs there, and
the ratio of lengths after and before is the column's. For [m, n] with m <= n the state is two moments of rank n
numbers; the projection is drawn again from a counter at every update and not kept. APOLLO-Mini has rank 1 and one
ratio for the whole matrix: 8 n + 4 bytes, next to nothing, which is SGD's memory.

An update may be at most 1 % longer than the one before (the norm-growth limiter of Fira, arXiv:2410.01623).
Vectors are Adam's, and so are embeddings and the output projection unless asked otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxmem.optim import projection
from jaxmem.optim.adam import Adam, Moments, unbiased
from jaxmem.optim.by_layer import At, Leaf, Rule, by_layer
from jaxmem.optim.galore import is_projected, rank_of
from jaxmem.optim.projection import Side
from jaxmem.sharding.leaves import Derived

GROWTH = 1.01
TINY = 1e-8


@dataclass(frozen=True)
class Scaled:
    moments: Moments
    leaf: Leaf
    rank: int
    refresh_every: int
    scale: float
    whole: bool  # one ratio for the matrix, not one for each row or column

    @property
    def side(self) -> Side:
        return Side(self.leaf, self.rank)

    def init(self, leaf: Leaf) -> dict[str, Derived]:
        low = self.side.low
        return {"m": low.zeros(), "v": low.zeros(), "length": leaf.zeros(())}

    def divides(self, dim: int, /) -> bool:
        return dim != self.side.away

    def update(self, g: jax.Array, state: dict[str, Any], at: At, /) -> tuple[jax.Array, dict[str, Any]]:
        wide, side = g.astype(jnp.float32), self.side
        key = jax.random.fold_in(at.key, (at.count - 1) // self.refresh_every)
        low = side.project(projection.random_projection(key, *side.basis_shape), wide)
        m, v = self.moments.advance(state["m"], state["v"], low)
        squares = _squares(m / (jnp.sqrt(v) + self.moments.epsilon), side.away), _squares(low, side.away)
        if self.whole:
            after, before, given = at.sums(*((x, None) for x in (*squares, wide * wide)))
            u, ratio = wide, jnp.sqrt(after) / (jnp.sqrt(before) + TINY)
            length = ratio * jnp.sqrt(given)
        else:
            after, before = squares
            u, ratio = wide * (jnp.sqrt(after) / (jnp.sqrt(before) + TINY)), jnp.float32(1)
            length = jnp.sqrt(at.sums((u * u, None))[0])
        # As long as the last one and a little; corrected for the averages' beginning only after that.
        most = jnp.where(state["length"] > 0, GROWTH * (state["length"] + TINY), jnp.inf)
        shrink = jnp.minimum(1.0, most / jnp.maximum(length, TINY))
        begun = jnp.sqrt(unbiased(self.moments.beta2, at.count)) / unbiased(self.moments.beta1, at.count)
        return u * (ratio * shrink * begun * self.scale**0.5), {"m": m, "v": v, "length": length * shrink}


def scale_by_apollo(
    rank: int | None = None,
    refresh_every: int = 200,
    scale: float = 1.0,
    beta1: float = 0.9,
    beta2: float = 0.95,
    epsilon: float = 1e-8,
    *,
    whole: bool = False,
    project_embeddings: bool = False,
    axes: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """`rank` None is a quarter of each matrix's smaller side. APOLLO-Mini: `rank=1, scale=128, whole=True`.
    `project_embeddings`: embeddings and the output projection too.

    >>> state = scale_by_apollo(rank=1, whole=True).init({"w": jnp.zeros((32, 64))}).leaves["w"]
    >>> state["m"].value.shape
    (1, 64)
    """
    moments = Moments(beta1, beta2, epsilon)

    def rule_for(leaf: Leaf) -> Rule:
        if not is_projected(leaf, rank, project_embeddings):
            return Adam(moments)
        return Scaled(moments, leaf, rank_of(leaf, rank), refresh_every, scale, whole)

    return by_layer(rule_for, axes)


def _squares(x: jax.Array, over: int) -> jax.Array:
    return jnp.sum(x * x, axis=over, keepdims=True)
