"""GaLore: Adam on low-rank projections of gradients; all weights are trained (Zhao et al., arXiv:2403.03507).

For a matrix [m, n] with m <= n and rank r the state is a basis of m r elements and two moments of r n elements each: 4
(m r + 2 r n) bytes instead of 8 m n. For a square matrix with r = m / 4 this is 3 bytes per parameter, or 1 with 8-bit
moments and a bfloat16 basis (the dtype of the weights). Embeddings, the output projection, vectors, and matrices whose
smaller dimension is at most the rank use the inner optimizer.

The basis is refreshed every `refresh_every` updates by matmuls (`range_finder`). Layers are refreshed in turn; only the
first update refreshes all of them. Projecting to low rank and back costs 4 m n r FLOPs per update.

Q-GaLore (Zhang et al., arXiv:2407.08296) stores the basis in 4 bits and doubles the refresh interval of a layer
whose basis spans nearly the same space twice in a row.

By default the component of a gradient outside of the basis is discarded. `residual` adds it, with each column scaled by
the ratio by which Adam scaled its projection (Fira: Chen et al., arXiv:2410.01623): updates of full rank without more
state or matmuls. A large outside component is scaled down: its mean square per direction is at most that inside.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem.config.optimizers import GaLoreSettings, QGaLoreSettings
from jaxmem.kernels.scopes import run_count
from jaxmem.optim.layers import MatrixRule, ParameterSpec, State, UpdateContext, by_layer
from jaxmem.optim.rules.plain import Adam
from jaxmem.optim.rules.projection import Side, projected_side
from jaxmem.optim.rules.quantized import ADAM8, blocks, quantized, zeros
from jaxmem.optim.transformation import Rate, Transformation, with_learning_rate
from jaxmem.quant import QTensor, quantize, values_of
from jaxmem.typing import AxesTree

RuleFor = Callable[[ParameterSpec], MatrixRule]

BASIS_BLOCK = 256  # values of a quantized basis that share a scale
BASIS_FORMAT = "int4"
TINY = 1e-30  # avoids a division by zero


@dataclass(frozen=True)
class GaLoreRule(MatrixRule):
    settings: GaLoreSettings
    inner_for: RuleFor
    side: Side
    similarity: float | None = None  # Q-GaLore: least overlap of two bases, above chance, that doubles the interval

    def init(self, spec: ParameterSpec) -> State:
        basis = self.side.basis_spec
        low = self.side.projected_spec
        inner = self.inner_for(low).init(low)
        if self.similarity is None:
            return {"basis": basis.zeros(dtype=spec.dtype), "inner": inner}
        axis, block = blocks(basis, BASIS_BLOCK)
        zero = spec.state_array(jnp.zeros((), jnp.int32), ())
        codes = basis.state_array(zeros(basis.shape, BASIS_FORMAT, block, axis))
        return {"basis": codes, "inner": inner, "due": zero, "doublings": zero}

    def is_separable(self, dim: int, /) -> bool:
        del dim
        return False  # the range finder multiplies with the gradient and its transpose several times

    def update(self, g: jax.Array, state: State, context: UpdateContext, /) -> tuple[jax.Array, State]:
        key = jax.random.fold_in(context.key, context.count)
        scale = self.settings.scale
        every: Any = self.settings.refresh_every  # an array within `optax.inject_hyperparams`
        layer = context.layer
        layers = context.layers
        basis_state = {name: x for name, x in state.items() if name != "inner"}
        if self.similarity is None:
            turn = (context.count - 1 - layer * every // layers) % every == 0
            due = turn | (context.count == 1)
        else:
            due = context.count > state["due"]
        # An upper bound with Q-GaLore, and if the interval is an array.
        with jax.named_scope(run_count(1, 1 if isinstance(every, jax.Array) else every)):
            basis_state = jax.lax.cond(due, lambda k: self._refresh(g, k, context, key), lambda k: k, basis_state)
        # Matmuls use the dtype of the gradient: bfloat16 costs half of float32, and accumulates in float32.
        basis = values_of(basis_state["basis"], g.dtype)
        low = self.side.project(basis, g)
        direction, inner = self.inner_for(self.side.projected_spec).update(low, state["inner"], context)
        if not self.settings.residual:
            return scale * self.side.project_back(basis, direction.astype(g.dtype)), {**basis_state, "inner": inner}
        ratio = self._outside(g, low, direction)
        # u = P d + ratio (g - P low). With one ratio per column, this needs only one matmul.
        u = self.side.project_back(basis, (direction - ratio * low).astype(g.dtype)) + ratio * g.astype(jnp.float32)
        return scale * u, {**basis_state, "inner": inner}

    def _outside(self, g: jax.Array, low: jax.Array, direction: jax.Array) -> jax.Array:
        """The factor by which the component of each column outside of the basis is scaled."""
        squares = lambda x: jnp.sum(jnp.square(x.astype(jnp.float32)), axis=self.side.projected_dim, keepdims=True)  # noqa: E731
        inside = squares(low)
        # The basis is orthonormal: the squared norm outside is the squared norm of g minus that of the projection.
        rank = self.side.rank
        outside = (squares(g) - inside) * (rank / (g.shape[self.side.projected_dim] - rank))
        return jnp.sqrt(squares(direction) / jnp.maximum(jnp.maximum(inside, outside), TINY))

    def _refresh(self, g: jax.Array, basis_state: State, context: UpdateContext, key: jax.Array) -> State:
        old = values_of(basis_state["basis"], jnp.float32)
        new = self.side.find_basis(g.astype(jnp.float32), old, key)
        if self.similarity is None:
            return {"basis": new.astype(basis_state["basis"].dtype)}
        q: QTensor = basis_state["basis"]
        chance = self.side.rank / old.shape[0]  # the overlap of two independent subspaces
        overlap = (jnp.sum(jnp.square(old.T @ new)) / self.side.rank - chance) / (1 - chance)
        is_similar = overlap >= self.similarity
        every = self.settings.refresh_every
        # The first intervals differ between layers, so that layers are never refreshed in the same update.
        stagger = jnp.where(basis_state["due"] == 0, context.layer * every // context.layers, 0)
        doublings = basis_state["doublings"] + is_similar.astype(jnp.int32)
        return {
            "basis": quantize(new, q.format, q.block_size, q.axis),
            "due": context.count - 1 + (every << doublings) + stagger,
            "doublings": doublings,
        }


def scale_by_galore(settings: GaLoreSettings = GaLoreSettings(), *, axes: AxesTree = None) -> Transformation:
    """GaLore with Adam in float32. `rank` None is a quarter of the smaller dimension of each matrix.

    >>> state = scale_by_galore(GaLoreSettings(rank=8)).init({"w": jnp.zeros((32, 64))}).arrays
    >>> state["basis"]["w"].shape, state["inner_m"]["w"].shape
    ((32, 8), (8, 64))
    """
    return by_layer(lambda spec: _rule_for(settings, spec, lambda _: Adam(settings)), axes)


def galore_adamw(
    learning_rate: Rate,
    *,
    beta1: float = GaLoreSettings.beta1,
    beta2: float = GaLoreSettings.beta2,
    epsilon: float = GaLoreSettings.epsilon,
    weight_decay: float = GaLoreSettings.weight_decay,
    refresh_every: int = GaLoreSettings.refresh_every,
    scale: float = GaLoreSettings.scale,
    project_embeddings: bool = GaLoreSettings.project_embeddings,
    rank: int | None = GaLoreSettings.rank,
    residual: bool = GaLoreSettings.residual,
    axes: AxesTree = None,
) -> Transformation:
    """GaLore with AdamW. The arguments are those of `adamw`, and:

    Args:
        refresh_every: updates between two bases of a matrix.
        scale: the factor of the update.
        project_embeddings: whether embedding and output matrices are projected too.
        rank: the rank of the projection; None: a quarter of the smaller dimension of each matrix.
        residual: whether the component of the gradient outside of the basis is added to the update.
    """
    settings = GaLoreSettings(
        beta1=beta1,
        beta2=beta2,
        epsilon=epsilon,
        weight_decay=weight_decay,
        refresh_every=refresh_every,
        scale=scale,
        project_embeddings=project_embeddings,
        rank=rank,
        residual=residual,
    )
    return with_learning_rate(scale_by_galore(settings, axes=axes), learning_rate, weight_decay, axes)


def scale_by_galore8bit(settings: GaLoreSettings = GaLoreSettings(), *, axes: AxesTree = None) -> Transformation:
    """GaLore with Adam, whose moments have 8 bits."""
    return by_layer(lambda spec: _rule_for(settings, spec, quantized(Adam(settings), ADAM8)), axes)


def galore_adamw8bit(
    learning_rate: Rate,
    *,
    beta1: float = GaLoreSettings.beta1,
    beta2: float = GaLoreSettings.beta2,
    epsilon: float = GaLoreSettings.epsilon,
    weight_decay: float = GaLoreSettings.weight_decay,
    refresh_every: int = GaLoreSettings.refresh_every,
    scale: float = GaLoreSettings.scale,
    project_embeddings: bool = GaLoreSettings.project_embeddings,
    rank: int | None = GaLoreSettings.rank,
    residual: bool = GaLoreSettings.residual,
    axes: AxesTree = None,
) -> Transformation:
    """GaLore with AdamW, whose moments have 8 bits. The arguments are those of `galore_adamw`."""
    settings = GaLoreSettings(
        beta1=beta1,
        beta2=beta2,
        epsilon=epsilon,
        weight_decay=weight_decay,
        refresh_every=refresh_every,
        scale=scale,
        project_embeddings=project_embeddings,
        rank=rank,
        residual=residual,
    )
    return with_learning_rate(scale_by_galore8bit(settings, axes=axes), learning_rate, weight_decay, axes)


def scale_by_qgalore(settings: QGaLoreSettings = QGaLoreSettings(), *, axes: AxesTree = None) -> Transformation:
    """Q-GaLore: moments in 8 bits, bases in 4 bits."""
    inner = quantized(Adam(settings), ADAM8)
    return by_layer(lambda spec: _rule_for(settings, spec, inner, settings.similarity), axes)


def qgalore(
    learning_rate: Rate,
    *,
    beta1: float = QGaLoreSettings.beta1,
    beta2: float = QGaLoreSettings.beta2,
    epsilon: float = QGaLoreSettings.epsilon,
    weight_decay: float = QGaLoreSettings.weight_decay,
    refresh_every: int = QGaLoreSettings.refresh_every,
    scale: float = QGaLoreSettings.scale,
    project_embeddings: bool = QGaLoreSettings.project_embeddings,
    rank: int | None = QGaLoreSettings.rank,
    residual: bool = QGaLoreSettings.residual,
    similarity: float = QGaLoreSettings.similarity,
    axes: AxesTree = None,
) -> Transformation:
    """Q-GaLore with weight decay: moments in 8 bits, bases in 4 bits. `similarity`: the similarity of two successive
    bases from which on the interval between them is doubled. The other arguments are those of `galore_adamw`."""
    settings = QGaLoreSettings(
        beta1=beta1,
        beta2=beta2,
        epsilon=epsilon,
        weight_decay=weight_decay,
        refresh_every=refresh_every,
        scale=scale,
        project_embeddings=project_embeddings,
        rank=rank,
        residual=residual,
        similarity=similarity,
    )
    return with_learning_rate(scale_by_qgalore(settings, axes=axes), learning_rate, weight_decay, axes)


def _rule_for(
    settings: GaLoreSettings, spec: ParameterSpec, inner: RuleFor, similarity: float | None = None
) -> MatrixRule:
    side = projected_side(spec, settings.rank, settings.project_embeddings)
    return inner(spec) if side is None else GaLoreRule(settings, inner, side, similarity)
