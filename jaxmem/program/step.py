"""One update as a pure function of state and batch.

With P parameters in float32 and Adam, an update holds 4P bytes of weights, 8P of moments and 4P of gradients,
each divided by what the layout splits it over. Micro-batches are a scan whose gradients add up in one buffer:
the peak is that of one micro-batch, whatever the batch. On stages they go through the layers together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jaxmem import optim
from jaxmem.config import Precision
from jaxmem.precision import Params
from jaxmem.program import scaling
from jaxmem.program.objective import Batch, Objective, Sums, means
from jaxmem.program.pipelined import sums_of_all
from jaxmem.program.scaling import LossScale
from jaxmem.sharding import Axes, Role, constrain, is_axes
from jaxmem.stack import Pipeline

Metrics = dict[str, jax.Array]
_ROUNDING = 2**31 - 1  # folded into a step's key: what rounds weights, beside what drops activations
Micro = Callable[[Batch, jax.Array], tuple[Params, Sums]]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """All that an update changes, and all that a checkpoint holds."""

    step: jax.Array  # updates done
    params: Params
    opt_state: Any
    loss_scale: LossScale | None = None


def make_step(
    graphdef: Any,
    axes: Any,
    objective: Objective,
    tx: optax.GradientTransformation,
    learning_rate: optax.Schedule,
    seed: int,
    precision: Precision,
    pipeline: Pipeline | None = None,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """The training step. Leaves of the batch are [accumulate, rows, ...]; `axes` are the parameters'."""

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        scale = jnp.float32(1)
        if state.loss_scale:  # of a mean over a micro-batch, as everywhere else; objectives give sums
            scale = state.loss_scale.scale / batch["mask"][0].size

        def gradients(of: Callable[..., Sums], batch: Batch, key: jax.Array) -> tuple[Params, Sums]:
            def summed(params: Params) -> tuple[jax.Array, Sums]:
                sums = of(nnx.merge(graphdef, params), batch, key)
                return sums["loss"] * scale, sums

            grads, sums = jax.grad(summed, has_aux=True)(state.params)
            # Where the layout wants them, so that they are reduced into their parts and never held whole.
            return _pinned(grads, axes, "gradients"), sums

        def updated(grads: Params) -> tuple[Params, Any]:
            updates, opt_state = tx.update(grads, state.opt_state, state.params)
            draws = jax.random.fold_in(key, _ROUNDING) if precision.rounding == "stochastic" else None
            params = optim.apply(state.params, updates, draws, axes)
            # Cast where the optimizer's state lies, then gathered, or whole float32 updates would travel.
            return _pinned(params, axes, "optimizer"), opt_state

        key = jax.random.fold_in(jax.random.key(seed), state.step)
        keys = jax.random.split(key, jax.tree.leaves(batch)[0].shape[0])
        if pipeline is None:
            grads, sums = _accumulated(partial(gradients, objective), batch, keys)
        else:
            grads, sums = gradients(partial(sums_of_all, objective, pipeline), batch, keys)
        count = jnp.maximum(sums["count"], 1.0)
        grads = jax.tree.map(lambda g: (g.astype(jnp.float32) / (count * scale)).astype(g.dtype), grads)
        norm = optim.global_norm(grads)
        metrics = means(sums) | {
            "count": sums["count"],
            "gradient_norm": norm,
            "learning_rate": learning_rate(state.step),
        }
        if state.loss_scale is None:
            return TrainState(state.step + 1, *updated(grads)), metrics
        finite = jnp.isfinite(norm)
        params, opt_state = jax.lax.cond(finite, updated, lambda _: (state.params, state.opt_state), grads)
        loss_scale = scaling.after(state.loss_scale, finite, dynamic=precision.loss_scale == "dynamic")
        metrics |= {"loss_scale": loss_scale.scale, "skipped": loss_scale.skipped}
        return TrainState(state.step + 1, params, opt_state, loss_scale), metrics

    return step


def _accumulated(micro: Micro, batch: Batch, keys: jax.Array) -> tuple[Params, Sums]:
    """Gradients and sums over all micro-batches, added up in float32."""
    if len(keys) == 1:
        return micro(jax.tree.map(lambda x: x[0], batch), keys[0])

    def add(total: Any, one: tuple[Batch, jax.Array]) -> tuple[Any, None]:
        return jax.tree.map(lambda t, x: t + x.astype(t.dtype), total, micro(*one)), None

    shapes = jax.eval_shape(lambda: micro(jax.tree.map(lambda x: x[0], batch), keys[0]))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), shapes)
    return jax.lax.scan(add, zeros, (batch, keys))[0]


def _pinned(tree: Params, axes: Any, role: Role) -> Params:
    def pin(axes: Axes, x: jax.Array) -> jax.Array:
        return constrain(x, *axes, role=role)

    return jax.tree.map(pin, axes, tree, is_leaf=is_axes)
