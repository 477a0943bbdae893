"""APOLLO: the gradient, with each column scaled as Adam would scale it (Zhu et al., arXiv:2412.05270).

The scale of a column is estimated on a random projection of the gradient to `rank` rows: the norm of Adam's update of
the projection, divided by the norm of the projection. For [m, n] with m <= n the state is two rank x n moments; the
projection is generated from a counter at every update and not stored. APOLLO-Mini has rank 1 and one scale for the
complete matrix: 8 n + 4 bytes, the memory of SGD.

The norm of an update grows by at most 1 % per update (the norm-growth limiter of Fira, arXiv:2410.01623). Vectors use
Adam, and so do embeddings and the output projection unless `project_embeddings` is set.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxmem.config.optimizers import ApolloMiniSettings, ApolloSettings
from jaxmem.optim.layers import MatrixRule, ParameterSpec, State, UpdateContext, by_layer
from jaxmem.optim.rules.plain import Adam, bias_correction, next_moments
from jaxmem.optim.rules.projection import Side, projected_side, random_projection
from jaxmem.optim.transformation import Rate, Transformation, with_learning_rate
from jaxmem.typing import AxesTree

GROWTH = 1.01  # largest ratio of the norms of consecutive updates
TINY = 1e-8  # avoids a division by zero


@dataclass(frozen=True)
class ScaledByProjection(MatrixRule):
    settings: ApolloMiniSettings
    side: Side
    per_matrix: bool  # one scale for the matrix instead of one per row or column

    def init(self, spec: ParameterSpec) -> State:
        low = self.side.projected_spec
        return {"m": low.zeros(), "v": low.zeros(), "length": spec.zeros(())}

    def is_separable(self, dim: int, /) -> bool:
        return dim != self.side.projected_dim

    def update(self, g: jax.Array, state: State, context: UpdateContext, /) -> tuple[jax.Array, State]:
        wide = g.astype(jnp.float32)
        side = self.side
        key = jax.random.fold_in(context.key, (context.count - 1) // self.settings.refresh_every)
        low = side.project(random_projection(key, *side.basis_shape), wide)
        m, v = next_moments(self.settings, state["m"], state["v"], low)
        squares = (
            _squares(m / (jnp.sqrt(v) + self.settings.epsilon), side.projected_dim),
            _squares(low, side.projected_dim),
        )
        if self.per_matrix:
            after, before, square = context.sums(*((x, None) for x in (*squares, wide * wide)))
            u = wide
            ratio = jnp.sqrt(after) / (jnp.sqrt(before) + TINY)
            length = ratio * jnp.sqrt(square)
        else:
            after, before = squares
            u = wide * (jnp.sqrt(after) / (jnp.sqrt(before) + TINY))
            ratio = jnp.float32(1)
            length = jnp.sqrt(context.sums((u * u, None))[0])
        # The norm growth is limited before the bias of the moments is corrected.
        most = jnp.where(state["length"] > 0, GROWTH * (state["length"] + TINY), jnp.inf)
        shrink = jnp.minimum(1.0, most / jnp.maximum(length, TINY))
        beta1 = self.settings.beta1
        beta2 = self.settings.beta2
        unbiased = jnp.sqrt(bias_correction(beta2, context.count)) / bias_correction(beta1, context.count)
        return u * (ratio * shrink * unbiased * self.settings.scale**0.5), {"m": m, "v": v, "length": length * shrink}


def scale_by_apollo(settings: ApolloSettings = ApolloSettings(), *, axes: AxesTree = None) -> Transformation:
    """APOLLO with one scale per column. `rank` None is a quarter of the smaller dimension of each matrix."""
    return by_layer(lambda spec: _rule_for(settings, spec, settings.rank, per_matrix=False), axes)


def apollo(
    learning_rate: Rate,
    *,
    beta1: float = ApolloSettings.beta1,
    beta2: float = ApolloSettings.beta2,
    epsilon: float = ApolloSettings.epsilon,
    weight_decay: float = ApolloSettings.weight_decay,
    refresh_every: int = ApolloSettings.refresh_every,
    scale: float = ApolloSettings.scale,
    project_embeddings: bool = ApolloSettings.project_embeddings,
    rank: int | None = ApolloSettings.rank,
    axes: AxesTree = None,
) -> Transformation:
    """APOLLO with weight decay. `refresh_every`: updates between two random projections. The other arguments are those
    of `galore_adamw`."""
    settings = ApolloSettings(
        beta1=beta1,
        beta2=beta2,
        epsilon=epsilon,
        weight_decay=weight_decay,
        refresh_every=refresh_every,
        scale=scale,
        project_embeddings=project_embeddings,
        rank=rank,
    )
    return with_learning_rate(scale_by_apollo(settings, axes=axes), learning_rate, weight_decay, axes)


def scale_by_apollo_mini(
    settings: ApolloMiniSettings = ApolloMiniSettings(), *, axes: AxesTree = None
) -> Transformation:
    """APOLLO with rank 1 and one scale per matrix.

    >>> scale_by_apollo_mini().init({"w": jnp.zeros((32, 64))}).arrays["m"]["w"].shape
    (1, 64)
    """
    return by_layer(lambda spec: _rule_for(settings, spec, 1, per_matrix=True), axes)


def apollo_mini(
    learning_rate: Rate,
    *,
    beta1: float = ApolloMiniSettings.beta1,
    beta2: float = ApolloMiniSettings.beta2,
    epsilon: float = ApolloMiniSettings.epsilon,
    weight_decay: float = ApolloMiniSettings.weight_decay,
    refresh_every: int = ApolloMiniSettings.refresh_every,
    scale: float = ApolloMiniSettings.scale,
    project_embeddings: bool = ApolloMiniSettings.project_embeddings,
    axes: AxesTree = None,
) -> Transformation:
    """APOLLO-Mini with weight decay: almost no state. The arguments are those of `apollo`."""
    settings = ApolloMiniSettings(
        beta1=beta1,
        beta2=beta2,
        epsilon=epsilon,
        weight_decay=weight_decay,
        refresh_every=refresh_every,
        scale=scale,
        project_embeddings=project_embeddings,
    )
    return with_learning_rate(scale_by_apollo_mini(settings, axes=axes), learning_rate, weight_decay, axes)


def _rule_for(settings: ApolloMiniSettings, spec: ParameterSpec, rank: int | None, *, per_matrix: bool) -> MatrixRule:
    side = projected_side(spec, rank, settings.project_embeddings)
    return Adam(settings) if side is None else ScaledByProjection(settings, side, per_matrix)


def _squares(x: jax.Array, over: int) -> jax.Array:
    return jnp.sum(x * x, axis=over, keepdims=True)
