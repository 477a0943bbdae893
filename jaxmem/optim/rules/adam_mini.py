"""Adam-mini: one second moment per output neuron (Zhang et al., arXiv:2406.16793).

The weights of one neuron have a similar curvature. A matrix [m, n] has n second moments instead of mn: slightly more
than 4 bytes of state per parameter, half of Adam's. A block is a column (one output); in embedding and output matrices
it is the vector of one token. In the paper, queries and keys have one block per head; here they have one per neuron.
Vectors and scalars use Adam.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxmem.config.optimizers import AdamSettings, AdamWSettings
from jaxmem.optim.layers import MatrixRule, ParameterSpec, State, UpdateContext, by_layer
from jaxmem.optim.rules.plain import Adam, direction, next_moments
from jaxmem.optim.transformation import Rate, Transformation, with_learning_rate
from jaxmem.sharding.weights import is_matrix
from jaxmem.typing import AxesTree


@dataclass(frozen=True)
class PerNeuron(MatrixRule):
    settings: AdamSettings
    neurons: int  # the dimension of neurons

    def init(self, spec: ParameterSpec) -> State:
        return {"m": spec.zeros(), "v": spec.zeros((self.neurons,))}

    def update(self, g: jax.Array, state: State, context: UpdateContext, /) -> tuple[jax.Array, State]:
        g = g.astype(jnp.float32)
        averaged_dims = tuple(d for d in range(g.ndim) if d != self.neurons)
        m, v = next_moments(self.settings, state["m"], state["v"], g, jnp.mean(g * g, axis=averaged_dims))
        return direction(self.settings, m, jnp.expand_dims(v, averaged_dims), context.count), {"m": m, "v": v}


def scale_by_adam_mini(settings: AdamSettings = AdamSettings(), *, axes: AxesTree = None) -> Transformation:
    """Adam with one second moment per output neuron.

    >>> state = scale_by_adam_mini().init({"w": jnp.zeros((64, 32))}).arrays
    >>> state["m"]["w"].shape, state["v"]["w"].shape
    ((64, 32), (32,))
    """

    def rule_for(spec: ParameterSpec) -> MatrixRule:
        if not is_matrix(spec.axes):
            return Adam(settings)
        outputs = len(spec.shape) - 1
        return PerNeuron(settings, outputs if spec.vocab_dim is None else spec.vocab_dim)

    return by_layer(rule_for, axes)


def adam_mini(
    learning_rate: Rate,
    *,
    beta1: float = AdamWSettings.beta1,
    beta2: float = AdamWSettings.beta2,
    epsilon: float = AdamWSettings.epsilon,
    weight_decay: float = AdamWSettings.weight_decay,
    axes: AxesTree = None,
) -> Transformation:
    """AdamW with one second moment per output neuron: 4 bytes per parameter. The arguments are those of `adamw`."""
    settings = AdamWSettings(beta1=beta1, beta2=beta2, epsilon=epsilon, weight_decay=weight_decay)
    return with_learning_rate(scale_by_adam_mini(settings, axes=axes), learning_rate, weight_decay, axes)
