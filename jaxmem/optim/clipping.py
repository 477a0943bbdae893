"""Gradients no longer than a limit, in three ways.

`global`: all of them as one vector (Pascanu et al., arXiv:1211.5063). Its length is known when the last gradient is
made: an update during the backward pass needs a backward pass before it that only measures.

`previous`: all of them by the length that they had an update ago, 4 bytes of state. What is longer at once is clipped
one update late; the first is not clipped.

`weight`: each weight of each layer by its own length.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxmem.optim.apply import global_norm
from jaxmem.optim.piece import Piece
from jaxmem.sharding import Axes, is_axes

Means = Literal["global", "previous", "weight"]


class Previous(NamedTuple):
    norm: jax.Array  # of the last update's gradients


def clip(limit: float, by: Means = "global", *, axes: Any = None) -> optax.GradientTransformationExtraArgs:
    """`update(..., norm=n)`: the gradients given are only some of those whose length is n. `update(..., layer=i)`:
    they are those of one layer; `update(..., piece=p)`: those of some entries of a table.

    >>> tx = clip(1.0, "weight")
    >>> said, _ = tx.update({"a": jnp.float32(3.0), "b": jnp.float32(0.5)}, tx.init({}))
    >>> float(said["a"]), float(said["b"])
    (1.0, 0.5)
    """

    def init(_: Any) -> Any:
        # As if the gradients before the first had been just short enough.
        return Previous(jnp.float32(limit)) if by == "previous" else optax.EmptyState()

    def update(
        grads: Any,
        state: Any,
        params: Any = None,
        *,
        norm: jax.Array | None = None,
        layer: jax.Array | None = None,
        piece: Piece | None = None,
        **_: Any,
    ) -> tuple[Any, Any]:
        del params
        if by == "weight":
            names = jax.tree.map(lambda g: (None,) * g.ndim, grads) if axes is None else axes

            def own(names: Axes, g: jax.Array) -> jax.Array:
                first = int(names[:1] == ("layer",) and layer is None)
                squares = jnp.square(g.astype(jnp.float32))
                total = jnp.sum(squares, axis=tuple(range(first, g.ndim)), keepdims=True)
                return _shortened(g, limit, jnp.sqrt(total if piece is None else piece.total(total)))

            return jax.tree.map(own, names, grads, is_leaf=is_axes), state
        norm = global_norm(grads) if norm is None else norm
        length = state.norm if by == "previous" else norm
        new = Previous(norm) if by == "previous" else state
        return jax.tree.map(lambda g: _shortened(g, limit, length), grads), new

    return optax.GradientTransformationExtraArgs(init, update)


def remember(state: Any, norm: jax.Array) -> Any:
    """An optimizer's state with this as the length of the gradients that it has just seen in parts."""
    known = lambda x: isinstance(x, Previous)  # noqa: E731
    return jax.tree.map(lambda x: Previous(norm) if known(x) else x, state, is_leaf=known)


def _shortened(g: jax.Array, limit: float, norm: jax.Array) -> jax.Array:
    return (g.astype(jnp.float32) * jnp.minimum(1.0, limit / jnp.maximum(norm, 1e-30))).astype(g.dtype)
