"""What an optimizer does after it has scaled the gradients: decoupled weight decay and the learning rate."""

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax

from jaxmem.kernels.scopes import purpose
from jaxmem.optim.apply import axes_or_unnamed, rounded_by_hash
from jaxmem.optim.in_place import update_rows
from jaxmem.quant import values_of
from jaxmem.sharding.table import Axes
from jaxmem.sharding.weights import is_encoded, is_matrix
from jaxmem.typing import AxesTree, Tree

Rate: TypeAlias = float | jax.Array | optax.Schedule
Transformation: TypeAlias = optax.GradientTransformationExtraArgs


def with_learning_rate(
    scale: optax.GradientTransformation,
    learning_rate: Rate,
    weight_decay: float | jax.Array = 0.0,
    axes: AxesTree = None,
) -> Transformation:
    """An optimizer with weight decay and a learning rate.

    Args:
        scale: computes the updates before both.
        learning_rate: a number, or a function of the number of earlier updates.
        weight_decay: the share of a matrix that an update subtracts, times the learning rate.
        axes: the logical axes of each parameter; None: no parameter is a stack of layers.
    """
    # Checkpoints of runs with weight decay have an empty state before the number of updates.
    decay = [] if is_zero(weight_decay) else [optax.identity()]
    return chain(scale, *decay, scale_by_learning_rate(learning_rate, weight_decay, axes))


def is_zero(hyperparameter: float | jax.Array) -> bool:
    """Whether a hyperparameter is always zero. An array may change (`optax.inject_hyperparams`)."""
    return not isinstance(hyperparameter, jax.Array) and hyperparameter == 0


def scale_by_learning_rate(learning_rate: Rate, weight_decay: float | jax.Array, axes: AxesTree) -> Transformation:
    """Decoupled weight decay (Loshchilov and Hutter, arXiv:1711.05101) of matrices, but not of norms and biases, times
    the negative learning rate. Quantized weights are dequantized layer by layer, at most 8 M elements at a time.
    With `update(..., layer=i)`, each stacked leaf contains one layer.

    Both are computed in float32 and rounded by a hash. A bfloat16 update would lose a decay below half of its last bit:
    of Lion's updates, which are 1 or -1, that of every weight below 0.02."""
    has_decay = not is_zero(weight_decay)

    def init(_: Tree) -> optax.ScaleByScheduleState:
        return optax.ScaleByScheduleState(jnp.zeros((), jnp.int32))

    def update(updates: Tree, state: Tree, params: Tree = None, **_: Any) -> tuple[Tree, Tree]:
        rate = learning_rate(state.count) if callable(learning_rate) else learning_rate

        def scale(u: jax.Array, names: Axes, w: Any) -> jax.Array:
            if not has_decay or not is_matrix(names):
                return scaled(u)
            if is_encoded(w):
                return update_rows(scaled, u, w, names[len(names) - w.ndim :])
            return scaled(u.astype(jnp.promote_types(u.dtype, w.dtype)), w)

        def scaled(u: jax.Array, w: Any = None, *_: jax.Array) -> jax.Array:
            wide = jnp.promote_types(u.dtype, jnp.float32)
            decayed = u.astype(wide) if w is None else u.astype(wide) + weight_decay * values_of(w, wide)
            return rounded_by_hash(jnp.asarray(-rate, wide) * decayed, u.dtype, state.count)

        weights = params if has_decay else updates
        updates = jax.tree.map(scale, updates, axes_or_unnamed(axes, updates), weights)
        return updates, optax.ScaleByScheduleState(optax.safe_increment(state.count))

    return Transformation(init, update)


def named_update(tx: Transformation) -> Transformation:
    """The same optimizer; a compiled step shows which values it computes (`kernels.scopes`)."""
    return Transformation(tx.init, purpose("update")(tx.update))


def chain(*parts: optax.GradientTransformation) -> Transformation:
    """`optax.chain` that also works if implicit dtype promotion is off."""
    tx = optax.chain(*parts)
    return Transformation(with_promotion(tx.init), with_promotion(tx.update))


def with_promotion(function: Callable[..., Any]) -> Callable[..., Any]:
    """optax relies on implicit dtype promotion, which jaxmem turns off."""

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            return function(*args, **options)

    return call
