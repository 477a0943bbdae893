"""Decoupled weight decay (Loshchilov and Hutter, arXiv:1711.05101) of matrices.

Quantized weights are dequantized layer by layer, at most 8 M elements at a time, and added to the update in place.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxmem.optim.in_place import update_rows
from jaxmem.sharding import Axes, is_axes
from jaxmem.sharding.weights import is_quantized


def add_decayed_weights(weight_decay: float, axes: Any = None) -> optax.GradientTransformationExtraArgs:
    """Decays matrices, but not norms and biases. With `update(..., layer=i)`, stacked leaves are one layer."""

    def update(updates: Any, state: Any, params: Any, **_: Any) -> tuple[Any, Any]:
        def one(names: Axes, u: jax.Array, w: Any) -> jax.Array:
            stacked = names[:1] == ("layer",)
            if len(names) - stacked < 2:
                return u
            if not is_quantized(w):
                return u + weight_decay * w
            return update_rows(decayed, u, w, names[len(names) - w.ndim :])

        def decayed(u: jax.Array, w: Any, *_: jax.Array) -> jax.Array:
            return (u.astype(jnp.float32) + weight_decay * w.dequantize(jnp.float32)).astype(u.dtype)

        names = jax.tree.map(lambda u: (None,) * u.ndim, updates) if axes is None else axes
        return jax.tree.map(one, names, updates, params, is_leaf=is_axes), state

    return optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)
