"""A loop over parts of arrays that are updated in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def in_turn(count: int, axis: int, one: Callable[[Any, jax.Array], Any], arrays: Any) -> Any:
    """`one(part, i)` for each of `count` parts along `axis`, each result where the part was.

    A part is read after the one before was written, from what was written, and carried to its turn. Read in its
    turn, by several users of which one might come after the write, XLA would copy the arrays to be safe.
    """

    def read(x: jax.Array, i: jax.Array) -> jax.Array:
        return jax.lax.dynamic_index_in_dim(x, i, axis, keepdims=False)

    def step(i: jax.Array, carried: tuple[Any, Any]) -> tuple[Any, Any]:
        arrays, part = carried
        arrays = jax.tree.map(lambda x, new: jax.lax.dynamic_update_index_in_dim(x, new, i, axis), arrays, one(part, i))
        return arrays, jax.tree.map(lambda x: read(x, jnp.minimum(i + 1, count - 1)), arrays)

    first = jax.tree.map(lambda x: read(x, jnp.zeros((), jnp.int32)), arrays)
    return jax.lax.fori_loop(0, count, step, (arrays, first))[0]
