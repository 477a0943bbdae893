"""A weight and its gradient, where the two are not alike.

A weight that rests in codes has no derivative; what it is computed with, its values, has. A `Point` holds such a weight
and zeros of the form that its gradient shall have: the weight's shape, a dtype of its own. `sharding.gather` and
`exchange.lookup` compute with the weight and give the gradient to the zeros, which nothing reads: XLA drops them.

    at = points(params, jnp.bfloat16)
    grads = jax.grad(lambda at: loss(placed(params, at)))(at)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxmem.quant import QTensor


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Point:
    """What a weight rests in, and what its gradient is the gradient of."""

    rest: jax.Array | QTensor
    at: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.at.shape

    @property
    def ndim(self) -> int:
        return self.at.ndim


Weight: TypeAlias = jax.Array | QTensor | Point


def is_quantized(x: Any) -> bool:
    return isinstance(x, QTensor)


def points(params: Any, dtype: DTypeLike | None = None) -> Any:
    """What to differentiate by: a weight of this dtype itself, zeros in the place of any other; None: each weight's
    own dtype."""

    def point(w: jax.Array | QTensor) -> jax.Array:
        wanted = jnp.dtype(w.dtype if dtype is None else dtype)
        return w if isinstance(w, jax.Array) and w.dtype == wanted else jnp.zeros(w.shape, wanted)

    return jax.tree.map(point, params, is_leaf=is_quantized)


def placed(params: Any, at: Any) -> Any:
    """Weights whose gradients go to `at`."""

    def place(w: jax.Array | QTensor, at: jax.Array) -> Weight:
        return at if isinstance(w, jax.Array) and w.dtype == at.dtype else Point(w, at)

    return jax.tree.map(place, params, at, is_leaf=is_quantized)
