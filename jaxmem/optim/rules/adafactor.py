"""Adafactor: the second moment of a matrix as its row and column sums (Shazeer and Stern, arXiv:1804.04235).

A matrix [m, n] has m + n elements of state instead of 2mn: 4 (m + n) / (m n) bytes per parameter. A vector has one
value of state per element. Updates are scaled by the root mean square of the weights, so learning rates are relative:
about 1e-2, where Adam uses 1e-3 or less.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxmem.config.optimizers import AdafactorSettings
from jaxmem.optim.layers import MatrixRule, ParameterSpec, State, UpdateContext, by_layer
from jaxmem.optim.transformation import Rate, Transformation, with_learning_rate
from jaxmem.quant import values_of
from jaxmem.typing import AxesTree

DECAY = 0.8  # at update t the moving average keeps the share 1 - t^-decay
EPSILON = 1e-30  # added to each squared gradient
LEAST_SIZE = 1e-3  # lower limit of the root mean square of weights, for weights that are initialized to zero
MAX_RMS = 1.0  # upper limit of the root mean square of an update before it is scaled


@dataclass(frozen=True)
class Factored(MatrixRule):
    def init(self, spec: ParameterSpec) -> State:
        if spec.is_matrix:
            return {"row": spec.zeros((0,)), "column": spec.zeros((1,))}
        return {"v": spec.zeros()}

    def update(self, g: jax.Array, state: State, context: UpdateContext, /) -> tuple[jax.Array, State]:
        g = g.astype(jnp.float32)
        squares = g * g + EPSILON
        beta = 1 - context.count.astype(jnp.float32) ** -DECAY
        averaged = lambda old, now: beta * old + (1 - beta) * now  # noqa: E731
        values = values_of(context.weight, jnp.float32)
        weights = (values * values, None)
        if "row" in state:
            rows, columns = context.spec.shape
            row_sums, column_sums, total, old_total, weight_total = context.sums(
                (squares, 1), (squares, 0), (squares, None), (state["row"], 0), weights
            )
            row = averaged(state["row"], row_sums / columns)
            new = {"row": row, "column": averaged(state["column"], column_sums / rows)}
            # The outer product of both sums contains the mean twice.
            mean = averaged(old_total, total / columns) / rows
            u = g * jax.lax.rsqrt(new["row"] / mean)[:, None] * jax.lax.rsqrt(new["column"])[None, :]
        else:
            new = {"v": averaged(state["v"], squares)}
            u = g * jax.lax.rsqrt(new["v"])
            (weight_total,) = context.sums(weights)
        size = jnp.maximum(jnp.sqrt(weight_total / context.spec.size), LEAST_SIZE)
        (update,) = context.sums((u * u, None))
        return u * (size / jnp.maximum(1.0, jnp.sqrt(update / context.spec.size) / MAX_RMS)), new


def scale_by_adafactor(settings: AdafactorSettings = AdafactorSettings(), *, axes: AxesTree = None) -> Transformation:
    """Algorithm 4 of the paper with relative step sizes: factored second moment, updates clipped and scaled by weights.

    >>> tx = scale_by_adafactor()
    >>> tx.init({"w": jnp.zeros((64, 32))}).arrays["row"]["w"].shape
    (64,)
    """
    del settings  # weight decay is applied after the scaling
    return by_layer(lambda _: Factored(), axes)


def adafactor(
    learning_rate: Rate,
    *,
    weight_decay: float = AdafactorSettings.weight_decay,
    axes: AxesTree = None,
) -> Transformation:
    """Adafactor, with the root mean square of the weights as scale of its updates: use a rate of about 1e-2."""
    settings = AdafactorSettings(weight_decay=weight_decay)
    return with_learning_rate(scale_by_adafactor(settings, axes=axes), learning_rate, weight_decay, axes)
