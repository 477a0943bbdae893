"""Muon: orthogonalized momentum of matrices, all singular values one (Jordan et al.,
https://kellerjordan.github.io/posts/muon).

One moment for hidden matrices, 4 bytes per parameter; embeddings, the output projection, vectors and scalars use Adam.
Five Newton-Schulz steps bring every singular value near 1 by matmuls, 2 m^2 (2n + m) FLOPs each for [m, n] with
m <= n: less than 1 % of the step of a large batch. The update is scaled by 0.2 sqrt(n) to the root mean square of
Adam's updates, so that both use the same learning rate (Moonlight: Liu et al., arXiv:2502.16982).
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxmem.config.optimizers import MuonSettings
from jaxmem.optim.layers import MatrixRule, ParameterSpec, State, UpdateContext, by_layer
from jaxmem.optim.rules.plain import Adam
from jaxmem.optim.transformation import Rate, Transformation, with_learning_rate
from jaxmem.typing import AxesTree

STEPS = 5  # of the Newton-Schulz iteration
QUINTIC = (3.4445, -4.7750, 2.0315)  # the polynomial that is steepest at zero and maps values near one to near one
ADAM_SIZE = 0.2  # root mean square of Adam's updates


@dataclass(frozen=True)
class Orthogonalized(MatrixRule):
    momentum: float

    def init(self, spec: ParameterSpec) -> State:
        return {"m": spec.zeros()}

    def is_separable(self, dim: int, /) -> bool:
        del dim
        return False

    def update(self, g: jax.Array, state: State, _: UpdateContext, /) -> tuple[jax.Array, State]:
        g = g.astype(jnp.float32)
        m = self.momentum * state["m"] + (1 - self.momentum) * g
        ahead = self.momentum * m + (1 - self.momentum) * g  # Nesterov momentum
        return ADAM_SIZE * max(g.shape) ** 0.5 * newton_schulz(ahead), {"m": m}


def newton_schulz(x: jax.Array) -> jax.Array:
    """The orthogonal factor of a matrix, approximately: its singular values are between 0.7 and 1.2."""
    if x.shape[0] > x.shape[1]:
        return newton_schulz(x.T).T
    a, b, c = QUINTIC
    x = x / (jnp.linalg.norm(x) + 1e-7)
    for _ in range(STEPS):
        square = x @ x.T
        x = a * x + (b * square + c * (square @ square)) @ x
    return x


def scale_by_muon(settings: MuonSettings = MuonSettings(), *, axes: AxesTree = None) -> Transformation:
    """Muon for hidden matrices, Adam for other parameters. Without `axes` every matrix is a hidden matrix.

    >>> sorted(scale_by_muon().init({"w": jnp.zeros((64, 32))}).arrays)
    ['m']
    """

    def rule_for(spec: ParameterSpec) -> MatrixRule:
        return Orthogonalized(settings.momentum) if spec.is_hidden_matrix else Adam(settings)

    return by_layer(rule_for, axes)


def muon(
    learning_rate: Rate,
    *,
    momentum: float = MuonSettings.momentum,
    beta1: float = MuonSettings.beta1,
    beta2: float = MuonSettings.beta2,
    epsilon: float = MuonSettings.epsilon,
    weight_decay: float = MuonSettings.weight_decay,
    axes: AxesTree = None,
) -> Transformation:
    """Muon with weight decay; AdamW for parameters that are not hidden matrices. `momentum`: its decay in Muon. The
    other arguments are those of `adamw`."""
    settings = MuonSettings(momentum=momentum, beta1=beta1, beta2=beta2, epsilon=epsilon, weight_decay=weight_decay)
    return with_learning_rate(scale_by_muon(settings, axes=axes), learning_rate, weight_decay, axes)
