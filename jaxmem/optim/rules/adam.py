"""Adam as a rule for one matrix, for vectors and projected matrices of other optimizers.

optax's Adam has one counter for a tree and moments in the dtype of the weights. This one updates one layer or some of
its rows, in float32, for any stored format of the moments.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem.config.optimizers import AdamSettings
from jaxmem.optim.layers import MatrixRule, ParameterSpec, UpdateContext
from jaxmem.sharding.leaves import Derived


def next_moments(
    settings: AdamSettings, m: jax.Array, v: jax.Array, g: jax.Array, squares: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Both moments after a gradient (Kingma and Ba, arXiv:1412.6980). `squares` replaces the square of the gradient."""
    squares = g * g if squares is None else squares
    beta1, beta2 = settings.beta1, settings.beta2
    return beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * squares


def direction(settings: AdamSettings, m: jax.Array, v: jax.Array, count: jax.Array) -> jax.Array:
    """The update from both moments, corrected for their bias towards zero."""
    first, second = bias_correction(settings.beta1, count), bias_correction(settings.beta2, count)
    return m / first / (jnp.sqrt(v / second) + settings.epsilon)


def bias_correction(beta: float, count: jax.Array) -> jax.Array:
    """The divisor of a moving average that starts at zero, after `count` values."""
    return 1 - jnp.float32(beta) ** count.astype(jnp.float32)


@dataclass(frozen=True)
class Adam(MatrixRule):
    """Two float32 moments: 8 bytes per parameter for any dtype of the weight."""

    settings: AdamSettings

    def init(self, spec: ParameterSpec) -> dict[str, Derived]:
        return {"m": spec.zeros(), "v": spec.zeros()}

    def update(self, g: jax.Array, state: dict[str, Any], at: UpdateContext, /) -> tuple[jax.Array, dict[str, Any]]:
        m, v = next_moments(self.settings, state["m"], state["v"], g.astype(jnp.float32))
        return direction(self.settings, m, v, at.count), {"m": m, "v": v}
