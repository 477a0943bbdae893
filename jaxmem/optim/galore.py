"""GaLore: Adam on gradients projected to low rank, weights trained in full (Zhao et al., arXiv:2403.03507).

For a matrix [m, n] with m <= n and rank r the state is a basis of m r numbers and two moments of r n, 4 (m r + 2 r n)
bytes in place of 8 m n: with r = m / 4 and a square matrix 3 bytes a parameter, and 1 with moments in 8 bits and
a basis in bfloat16 (it has the weights' dtype). Embeddings, the output projection, vectors, and matrices whose smaller
side is not larger than the rank are the inner optimizer's alone.

The basis is found anew every `refresh_every` updates, by products of matrices (`range_finder`), in one layer after
the other: no update stalls for all of them, but the first. Costs 4 m n r FLOPs an update to project and back.

Q-GaLore (Zhang et al., arXiv:2407.08296) keeps the basis in 4 bits and looks less often where it does not change: a
layer whose basis spans nearly the same space twice in a row has its interval doubled.

What a gradient has outside of the basis is lost, and where the basis stays, so are those directions of the weights.
`residual` adds it as it is, each column scaled as Adam scaled what is inside (Fira: Chen et al., arXiv:2410.01623):
full rank, for no state and no product more. Where a column has more outside than a basis of its largest directions
would leave, it is scaled so that in the mean no direction outside moves more than those inside.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxmem.optim.adam import Adam, Moments
from jaxmem.optim.by_layer import At, Leaf, Rule, by_layer
from jaxmem.optim.projection import Side
from jaxmem.optim.quantized import ADAM8, blocks, quantized, zeros
from jaxmem.quant import QTensor, quantize

BASIS_BLOCK = 256
BASIS_FORMAT = "int4"
TINY = 1e-30


@dataclass(frozen=True)
class Projected:
    inner_for: Callable[[Leaf], Rule]
    leaf: Leaf
    rank: int
    refresh_every: int
    scale: float
    similarity: float | None = None  # of Q-GaLore: the share of the old space in the new that counts as the same
    residual: bool = False

    @property
    def side(self) -> Side:
        return Side(self.leaf, self.rank)

    def init(self, leaf: Leaf) -> dict[str, Any]:
        basis, low = self.side.basis, self.side.low
        inner = self.inner_for(low).init(low)
        if self.similarity is None:
            return {"basis": basis.zeros(dtype=self.leaf.dtype), "inner": inner}
        axis, block = blocks(basis, BASIS_BLOCK)
        zero = leaf.keep(jnp.zeros((), jnp.int32), ())
        codes = basis.keep(zeros(basis.shape, BASIS_FORMAT, block, axis))
        return {"basis": codes, "inner": inner, "due": zero, "interval": zero}

    def divides(self, _: int, /) -> bool:
        return False  # a basis is found by going to the gradient and back several times

    def update(self, g: jax.Array, state: dict[str, Any], at: At, /) -> tuple[jax.Array, dict[str, Any]]:
        key = jax.random.fold_in(at.key, at.count)
        kept = {name: x for name, x in state.items() if name != "inner"}
        if self.similarity is None:
            turn = (at.count - 1 - at.layer * self.refresh_every // at.layers) % self.refresh_every == 0
            due = turn | (at.count == 1)
        else:
            due = at.count > state["due"]
        with jax.named_scope(f"runs_1_in_{self.refresh_every}"):  # at most: for those who count operations
            kept = jax.lax.cond(due, lambda k: self._refreshed(g, k, at, key), lambda k: k, kept)
        # Products of numbers as the weights have them: of bfloat16 these cost half of float32's, and add up in float32.
        basis = _values(kept["basis"], g.dtype)
        low = self.side.project(basis, g)
        direction, inner = self.inner_for(self.side.low).update(low, state["inner"], at)
        if not self.residual:
            return self.scale * self.side.back(basis, direction.astype(g.dtype)), {**kept, "inner": inner}
        ratio = self._outside(g, low, direction)
        # u = P d + ratio (g - P low), a column's ratio being one number: both products in one.
        u = self.side.back(basis, (direction - ratio * low).astype(g.dtype)) + ratio * g.astype(jnp.float32)
        return self.scale * u, {**kept, "inner": inner}

    def _outside(self, g: jax.Array, low: jax.Array, direction: jax.Array) -> jax.Array:
        """By what each column outside of the basis is multiplied."""
        squares = lambda x: jnp.sum(jnp.square(x.astype(jnp.float32)), axis=self.side.away, keepdims=True)  # noqa: E731
        inside = squares(low)
        # A basis is orthonormal: what is outside has the rest of the squares, in the rest of the directions.
        outside = (squares(g) - inside) * (self.rank / (self.leaf.shape[self.side.away] - self.rank))
        return jnp.sqrt(squares(direction) / jnp.maximum(jnp.maximum(inside, outside), TINY))

    def _refreshed(self, g: jax.Array, kept: dict[str, Any], at: At, key: jax.Array) -> dict[str, Any]:
        old = _values(kept["basis"], jnp.float32)
        new = self.side.find(g.astype(jnp.float32), old, key)
        if self.similarity is None:
            return {"basis": new.astype(kept["basis"].dtype)}
        q: QTensor = kept["basis"]
        same = jnp.sum(jnp.square(old.T @ new)) / self.rank >= self.similarity
        interval = jnp.where(kept["interval"] == 0, self.refresh_every, kept["interval"])
        # The layers' first intervals differ, and so all their later turns.
        stagger = jnp.where(kept["interval"] == 0, at.layer * self.refresh_every // at.layers, 0)
        interval = jnp.where(same, 2 * interval, interval)
        return {
            "basis": quantize(new, q.format, q.block_size, q.axis),
            "due": at.count - 1 + interval + stagger,
            "interval": interval,
        }


def scale_by_galore(
    rank: int | None = None,
    refresh_every: int = 200,
    scale: float = 0.25,
    inner_for: Callable[[Leaf], Rule] = lambda _: Adam(),
    similarity: float | None = None,
    *,
    residual: bool = False,
    project_embeddings: bool = False,
    axes: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Of any inner rule. `rank` None is a quarter of each matrix's smaller side. `project_embeddings`: embeddings and
    the output projection too.

    >>> state = scale_by_galore(rank=8).init({"w": jnp.zeros((32, 64))}).leaves["w"]
    >>> state["basis"].value.shape, state["inner"]["m"].value.shape
    ((32, 8), (8, 64))
    """

    def rule_for(leaf: Leaf) -> Rule:
        if not is_projected(leaf, rank, project_embeddings):
            return inner_for(leaf)
        return Projected(inner_for, leaf, rank_of(leaf, rank), refresh_every, scale, similarity, residual)

    return by_layer(rule_for, axes)


def scale_by_galore_adam(
    rank: int | None = None,
    refresh_every: int = 200,
    scale: float = 0.25,
    beta1: float = 0.9,
    beta2: float = 0.95,
    epsilon: float = 1e-8,
    *,
    bits: int = 32,
    similarity: float | None = None,
    residual: bool = False,
    project_embeddings: bool = False,
    axes: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """GaLore on Adam whose moments have 32 or 8 bits."""
    adam = Adam(Moments(beta1, beta2, epsilon))
    inner_for = quantized(adam, ADAM8) if bits == 8 else lambda _: adam
    return scale_by_galore(
        rank,
        refresh_every,
        scale,
        inner_for,
        similarity,
        residual=residual,
        project_embeddings=project_embeddings,
        axes=axes,
    )


def rank_of(leaf: Leaf, rank: int | None) -> int:
    return max(1, min(leaf.shape) // 4) if rank is None else rank


def is_projected(leaf: Leaf, rank: int | None, project_embeddings: bool) -> bool:
    """Matrices that a projection makes smaller; tables with a row for each token only where they are asked for."""
    wanted = leaf.is_hidden_matrix or (len(leaf.shape) == 2 and project_embeddings)
    return wanted and rank_of(leaf, rank) < min(leaf.shape)


def _values(basis: Any, dtype: Any) -> jax.Array:
    return basis.dequantize(dtype) if isinstance(basis, QTensor) else basis.astype(dtype)
