"""AdamW, SGD and Lion, in two forms: transformations of optax, and rules for a single matrix.

The transformations have one step counter for all weights, and state in the dtype of the weights. The rules update one
layer or some of its rows, in float32, for any stored format of the moments. Other optimizers also use the rule `Adam`
for vectors and projected matrices.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxmem.config.optimizers import AdamSettings, AdamWSettings, LionSettings, SgdSettings
from jaxmem.optim.apply import rounded_by_hash, widened
from jaxmem.optim.layers import MatrixRule, ParameterSpec, State, UpdateContext
from jaxmem.optim.transformation import Rate, Transformation, is_zero, with_learning_rate
from jaxmem.sharding.weights import is_encoded
from jaxmem.typing import AxesTree, Tree


def scale_by_adam(settings: AdamSettings = AdamSettings(), *, axes: AxesTree = None) -> optax.GradientTransformation:
    """Adam with two moments: 8 bytes per parameter for float32 weights."""
    del axes  # elementwise: a stack is treated like any other array
    return _in_dtype_of_weights(optax.scale_by_adam(settings.beta1, settings.beta2, settings.epsilon))


def adamw(
    learning_rate: Rate,
    *,
    beta1: float = AdamWSettings.beta1,
    beta2: float = AdamWSettings.beta2,
    epsilon: float = AdamWSettings.epsilon,
    weight_decay: float = AdamWSettings.weight_decay,
    axes: AxesTree = None,
) -> Transformation:
    """Adam with decoupled weight decay of matrices (Loshchilov and Hutter, arXiv:1711.05101).

    Args:
        learning_rate: a number, or a function of the number of earlier updates.
        beta1: the decay of the first moment.
        beta2: the decay of the second moment.
        epsilon: is added to the square root of the second moment.
        weight_decay: the share of a matrix that an update subtracts, times the learning rate.
        axes: the logical axes of each parameter; None: no parameter is a stack of layers.
    """
    settings = AdamWSettings(beta1=beta1, beta2=beta2, epsilon=epsilon, weight_decay=weight_decay)
    return with_learning_rate(scale_by_adam(settings, axes=axes), learning_rate, weight_decay, axes)


def adam(
    learning_rate: Rate,
    *,
    beta1: float = AdamSettings.beta1,
    beta2: float = AdamSettings.beta2,
    epsilon: float = AdamSettings.epsilon,
    axes: AxesTree = None,
) -> Transformation:
    """Adam without weight decay (Kingma and Ba, arXiv:1412.6980). The arguments are those of `adamw`."""
    settings = AdamSettings(beta1=beta1, beta2=beta2, epsilon=epsilon)
    return with_learning_rate(scale_by_adam(settings, axes=axes), learning_rate, 0.0, axes)


def scale_by_lion(settings: LionSettings = LionSettings(), *, axes: AxesTree = None) -> optax.GradientTransformation:
    """Lion with one moment (Chen et al., arXiv:2302.06675)."""
    del axes
    return _in_dtype_of_weights(optax.scale_by_lion(settings.beta1, settings.beta2))


def lion(
    learning_rate: Rate,
    *,
    beta1: float = LionSettings.beta1,
    beta2: float = LionSettings.beta2,
    weight_decay: float = LionSettings.weight_decay,
    axes: AxesTree = None,
) -> Transformation:
    """Lion: updates are signs, so use at most a third of the learning rate of Adam. Arguments: see `adamw`."""
    settings = LionSettings(beta1=beta1, beta2=beta2, weight_decay=weight_decay)
    return with_learning_rate(scale_by_lion(settings, axes=axes), learning_rate, weight_decay, axes)


def trace(settings: SgdSettings = SgdSettings(), *, axes: AxesTree = None) -> optax.GradientTransformation:
    """SGD: no state without momentum; with momentum, one value per parameter."""
    del axes
    return optax.identity() if is_zero(settings.momentum) else _in_dtype_of_weights(_counted_trace(settings.momentum))


def sgd(
    learning_rate: Rate,
    *,
    momentum: float = SgdSettings.momentum,
    weight_decay: float = SgdSettings.weight_decay,
    axes: AxesTree = None,
) -> Transformation:
    """SGD; with momentum one state value per parameter, without it none. `momentum`: its decay; 0: none. The other
    arguments are those of `adamw`."""
    settings = SgdSettings(momentum=momentum, weight_decay=weight_decay)
    return with_learning_rate(trace(settings, axes=axes), learning_rate, weight_decay, axes)


class TraceState(NamedTuple):
    """The state of `optax.trace`, and the number of updates, which rounding depends on."""

    count: jax.Array  # type: ignore[assignment]
    trace: Tree


def _counted_trace(decay: float) -> optax.GradientTransformation:
    tx = optax.trace(decay)

    def update(updates: Tree, state: TraceState, params: Tree = None) -> tuple[Tree, TraceState]:
        updates, inner = tx.update(updates, optax.TraceState(state.trace), params)
        return updates, TraceState(optax.safe_increment(state.count), inner.trace)

    return optax.GradientTransformation(lambda p: TraceState(jnp.zeros((), jnp.int32), tx.init(p).trace), update)


def _in_dtype_of_weights(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """`tx` with state in the dtype of each weight (float32 for float16), for any dtype of its gradient. The dtype of a
    quantized weight is that of its dequantized values.

    It computes in float32. In bfloat16 a decay of 0.999 would be 1, and a mean of the last 1,000 squares that is
    rounded to nearest would never decrease, so its state is rounded by a hash of its values and of the `count` in the
    state: without it, an unchanged value would be rounded in the same way forever.
    """

    def init(params: Tree) -> Tree:
        plain = lambda w: jnp.zeros(w.shape, w.dtype) if is_encoded(w) else w  # noqa: E731
        return tx.init(widened(jax.tree.map(plain, params, is_leaf=is_encoded)))

    def update(updates: Tree, state: Tree, params: Tree = None) -> tuple[Tree, Tree]:
        dtypes, _ = jax.eval_shape(tx.update, widened(updates), state, params)
        updates, new = tx.update(*jax.tree.map(_wide, (updates, state)), params)
        updates = jax.tree.map(lambda u, like: u.astype(like.dtype), updates, dtypes)
        return updates, jax.tree.map(lambda new, old: rounded_by_hash(new, old.dtype, state.count), new, state)

    return optax.GradientTransformation(init, update)


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32) if x.dtype in (jnp.bfloat16, jnp.float16) else x


def next_moments(
    settings: AdamSettings, m: jax.Array, v: jax.Array, g: jax.Array, squares: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Both moments after a gradient (Kingma and Ba, arXiv:1412.6980). `squares` replaces the square of the gradient."""
    squares = g * g if squares is None else squares
    beta1 = settings.beta1
    beta2 = settings.beta2
    return beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * squares


def direction(settings: AdamSettings, m: jax.Array, v: jax.Array, count: jax.Array) -> jax.Array:
    """The update from both moments, corrected for their bias towards zero."""
    first = bias_correction(settings.beta1, count)
    second = bias_correction(settings.beta2, count)
    return m / first / (jnp.sqrt(v / second) + settings.epsilon)


def bias_correction(beta: float, count: jax.Array) -> jax.Array:
    """The divisor of a moving average that starts at zero, after `count` values."""
    return 1 - jnp.float32(beta) ** count.astype(jnp.float32)


@dataclass(frozen=True)
class Adam(MatrixRule):
    """Two float32 moments: 8 bytes per parameter for any dtype of the weight."""

    settings: AdamSettings

    def init(self, spec: ParameterSpec) -> State:
        return {"m": spec.zeros(), "v": spec.zeros()}

    def update(self, g: jax.Array, state: State, context: UpdateContext, /) -> tuple[jax.Array, State]:
        m, v = next_moments(self.settings, state["m"], state["v"], g.astype(jnp.float32))
        return direction(self.settings, m, v, context.count), {"m": m, "v": v}


@dataclass(frozen=True)
class Lion(MatrixRule):
    """The sign of an average of the stored moment and the new gradient (Chen et al., arXiv:2302.06675)."""

    settings: LionSettings

    def init(self, spec: ParameterSpec) -> State:
        return {"m": spec.zeros()}

    def update(self, g: jax.Array, state: State, _: UpdateContext, /) -> tuple[jax.Array, State]:
        g = g.astype(jnp.float32)
        m = state["m"]
        beta1 = self.settings.beta1
        beta2 = self.settings.beta2
        return jnp.sign(beta1 * m + (1 - beta1) * g), {"m": beta2 * m + (1 - beta2) * g}


@dataclass(frozen=True)
class Momentum(MatrixRule):
    decay: float

    def init(self, spec: ParameterSpec) -> State:
        return {"m": spec.zeros()}

    def update(self, g: jax.Array, state: State, _: UpdateContext, /) -> tuple[jax.Array, State]:
        m = self.decay * state["m"] + g.astype(jnp.float32)
        return m, {"m": m}
