"""Adam-mini: one second moment for all weights of an output neuron (Zhang et al., arXiv:2406.16793).

Weights that meet in one neuron share a scale of curvature. A matrix [m, n] keeps n second moments in place of mn: 4
bytes of state a parameter and a little, half of Adam's. A block is a column (what gives one output), of embeddings
and output projections the vector of one token. Queries and keys have a block a head in the paper; here they have one
a neuron, which is finer. Vectors and scalars are Adam's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxmem.optim.adam import Adam, Moments
from jaxmem.optim.by_layer import At, Leaf, Rule, by_layer
from jaxmem.sharding.leaves import Derived


@dataclass(frozen=True)
class PerNeuron:
    moments: Moments
    neurons: int  # the dimension that counts them

    def init(self, leaf: Leaf) -> dict[str, Derived]:
        return {"m": leaf.zeros(), "v": leaf.zeros((self.neurons,))}

    def divides(self, _: int, /) -> bool:
        return True

    def update(self, g: jax.Array, state: dict[str, Any], at: At, /) -> tuple[jax.Array, dict[str, Any]]:
        g = g.astype(jnp.float32)
        others = tuple(d for d in range(g.ndim) if d != self.neurons)
        mean_square = jnp.mean(g * g, axis=others)
        m = self.moments.beta1 * state["m"] + (1 - self.moments.beta1) * g
        v = self.moments.beta2 * state["v"] + (1 - self.moments.beta2) * mean_square
        return self.moments.direction(m, jnp.expand_dims(v, others), at.count), {"m": m, "v": v}


def scale_by_adam_mini(
    beta1: float = 0.9, beta2: float = 0.95, epsilon: float = 1e-8, *, axes: Any = None
) -> optax.GradientTransformationExtraArgs:
    """
    >>> state = scale_by_adam_mini().init({"w": jnp.zeros((64, 32))}).leaves["w"]
    >>> state["m"].value.shape, state["v"].value.shape
    ((64, 32), (32,))
    """
    moments = Moments(beta1, beta2, epsilon)

    def rule_for(leaf: Leaf) -> Rule:
        if len(leaf.shape) < 2:
            return Adam(moments)
        return PerNeuron(moments, leaf.axes.index("vocab") if "vocab" in leaf.axes else len(leaf.shape) - 1)

    return by_layer(rule_for, axes)
