"""Gradient clipping by one of three norms.

`global`: the norm of all gradients (Pascanu et al., arXiv:1211.5063). It is known only after the last gradient, so an
update during the backward pass needs another backward pass before it, which only computes the norm.

`previous`: the norm of all gradients of the previous update, 4 bytes of state. A sudden increase of the norm takes
effect one update late; the first update is not clipped.

`weight`: the gradient norm of each weight of each layer, separately.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxmem.optim.apply import VocabSlice, axes_or_unnamed, global_norm
from jaxmem.sharding.table import Axes, is_axes, is_stacked
from jaxmem.typing import AxesTree, Tree

ClipBy = Literal["global", "previous", "weight"]


class PreviousNorm(NamedTuple):
    norm: jax.Array  # norm of the gradients of the last update


def clip(limit: float, by: ClipBy = "global", *, axes: AxesTree = None) -> optax.GradientTransformationExtraArgs:
    """Clips gradients. With `update(grads, ..., norm=n)`, n is the norm of all gradients, of which `grads` are a part.
    With `layer=i`, `grads` are the gradients of one layer; with `vocab_slice=s`, of some rows of a vocabulary matrix.

    >>> tx = clip(1.0, "weight")
    >>> clipped, _ = tx.update({"a": jnp.float32(3.0), "b": jnp.float32(0.5)}, tx.init({}))
    >>> float(clipped["a"]), float(clipped["b"])
    (1.0, 0.5)
    """

    def init(_: Any) -> Tree:
        # The first norm is the limit itself, so that the first update is not clipped.
        return PreviousNorm(jnp.float32(limit)) if by == "previous" else optax.EmptyState()

    def update(
        grads: Tree,
        state: Tree,
        params: Tree = None,
        *,
        norm: jax.Array | None = None,
        layer: jax.Array | None = None,
        vocab_slice: VocabSlice | None = None,
        **_: Any,
    ) -> tuple[Tree, Tree]:
        del params
        if by == "weight":

            def clip_weight(names: Axes, g: jax.Array) -> jax.Array:
                first = int(is_stacked(names) and layer is None)
                squares = jnp.square(g.astype(jnp.float32))
                total = jnp.sum(squares, axis=tuple(range(first, g.ndim)), keepdims=True)
                return _scale_down(g, limit, jnp.sqrt(total if vocab_slice is None else vocab_slice.total(total)))

            return jax.tree.map(clip_weight, axes_or_unnamed(axes, grads), grads, is_leaf=is_axes), state
        norm = global_norm(grads) if norm is None else norm
        length = state.norm if by == "previous" else norm
        new = PreviousNorm(norm) if by == "previous" else state
        return jax.tree.map(lambda g: _scale_down(g, limit, length), grads), new

    return optax.GradientTransformationExtraArgs(init, update)


def record_norm(state: Tree, norm: jax.Array) -> Tree:
    """The state with `norm` as the norm of all gradients, for gradients that the optimizer receives in parts."""
    known = lambda x: isinstance(x, PreviousNorm)  # noqa: E731
    return jax.tree.map(lambda x: PreviousNorm(norm) if known(x) else x, state, is_leaf=known)


def _scale_down(g: jax.Array, limit: float, norm: jax.Array) -> jax.Array:
    return (g.astype(jnp.float32) * jnp.minimum(1.0, limit / jnp.maximum(norm, 1e-30))).astype(g.dtype)
