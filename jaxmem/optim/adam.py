"""Adam as a rule for one weight: what other rules fall back to, and what they run in a smaller space."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem.optim.by_layer import At, Leaf
from jaxmem.sharding.leaves import Derived


@dataclass(frozen=True)
class Moments:
    """Adam's decay rates and the least denominator (Kingma and Ba, arXiv:1412.6980)."""

    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8

    def advance(self, m: jax.Array, v: jax.Array, g: jax.Array) -> tuple[jax.Array, jax.Array]:
        return self.beta1 * m + (1 - self.beta1) * g, self.beta2 * v + (1 - self.beta2) * g * g

    def direction(self, m: jax.Array, v: jax.Array, count: jax.Array) -> jax.Array:
        """Of averages that began at zero, which both are corrected for."""
        return m / unbiased(self.beta1, count) / (jnp.sqrt(v / unbiased(self.beta2, count)) + self.epsilon)


def unbiased(beta: float, count: jax.Array) -> jax.Array:
    """What an average that began at zero is too small by after `count` values."""
    return 1 - jnp.float32(beta) ** count.astype(jnp.float32)


@dataclass(frozen=True)
class Adam:
    """Two float32 numbers a weight: 8 bytes, whatever dtype the weight has."""

    moments: Moments = Moments()

    def init(self, leaf: Leaf) -> dict[str, Derived]:
        return {"m": leaf.zeros(), "v": leaf.zeros()}

    def divides(self, _: int, /) -> bool:
        return True

    def update(self, g: jax.Array, state: dict[str, Any], at: At, /) -> tuple[jax.Array, dict[str, Any]]:
        m, v = self.moments.advance(state["m"], state["v"], g.astype(jnp.float32))
        return self.moments.direction(m, v, at.count), {"m": m, "v": v}
