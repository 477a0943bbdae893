"""One update as a pure function of state and batch.

With P parameters in float32 and Adam, an update holds 4P bytes of weights, 8P of moments and 4P of gradients,
each divided by what the layout splits it over. Micro-batches are a scan whose gradients add up in one buffer:
the peak is that of one micro-batch, whatever the batch. On stages they go through the layers together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxmem import optim
from jaxmem.config import Precision
from jaxmem.optim.parts import pinned
from jaxmem.quant.precision import Params
from jaxmem.sharding import axes_at_rest, weights
from jaxmem.stack import Pipeline
from jaxmem.step import nonfinite, scaling
from jaxmem.step.gradients import accumulated, at_once, in_one_pass
from jaxmem.step.host_state import InLayers
from jaxmem.step.objective import Batch, Objective, Sums, means
from jaxmem.step.pipelined import sums_of_all
from jaxmem.step.scaling import LossScale
from jaxmem.step.update_during import During

Metrics = dict[str, jax.Array]
CULPRIT = "culprit"  # of the metrics: the place of the first gradient that is no number among `Program.culprits`, or -1
_ROUNDING = 2**31 - 1  # folded into a step's key: what rounds weights, beside what drops activations


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
    compute: np.dtype,
    pipeline: Pipeline | None = None,
    gradients_in: np.dtype | None = None,
    during: During | None = None,
    skip: bool = False,
    choice: optim.Choice | None = None,
    in_layers: InLayers | None = None,
    kernel: Literal["none", "pallas"] = "none",
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """The training step. Leaves of the batch are [accumulate, rows, ...]; `axes` are those of the parameters that
    learn, `choice` says which, None: all; `compute` is the dtype that products run in, `gradients_in` what gradients
    are held in, None: each in its weight's own. `skip`: an update whose gradients are not finite is left out.
    `kernel`: what `optim.apply` may use."""

    some = {} if choice is None else choice.some

    def said(state: TrainState, sums: Sums, squares: jax.Array) -> Metrics:
        own = {"count": sums["count"], "learning_rate": learning_rate(state.step), CULPRIT: nonfinite.first(squares)}
        return means(sums) | own | {"gradient_norm": jnp.sqrt(jnp.sum(squares))}

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        scale = jnp.float32(1)
        if state.loss_scale:  # of a mean over a micro-batch, as everywhere else; objectives give sums
            scale = state.loss_scale.scale / batch["mask"][0].size

        def loss(of: Callable[..., Sums], at: Params, batch: Batch, keys: jax.Array) -> tuple[jax.Array, Sums]:
            sums = of(nnx.merge(graphdef, weights.placed(state.params, at, some)), batch, keys)
            return sums["loss"] * scale, sums

        def updated(grads: Params) -> tuple[Params, Any]:
            if in_layers is not None:
                new, opt_state = in_layers(own, grads, state.opt_state, write, norm)
            else:
                updates, opt_state = tx.update(grads, state.opt_state, own)
                new = write(own, updates, axes=axes)
                # Cast where the optimizer's state lies, then gathered, or whole float32 updates would travel.
                new = pinned(new, axes_at_rest(axes, new), "optimizer")
            return new if choice is None else choice.put(state.params, new), opt_state

        own = state.params if choice is None else choice(state.params)
        at = weights.points(own, gradients_in)
        key = jax.random.fold_in(jax.random.key(seed), state.step)
        draws = jax.random.fold_in(key, _ROUNDING) if precision.stochastic else None
        write = partial(optim.apply, key=draws, kernel=kernel)
        keys = jax.random.split(key, batch["mask"].shape[:2])  # each row's own
        if during is not None:
            params, opt_state, sums, squares = during(state.params, state.opt_state, batch, keys, write)
            return TrainState(state.step + 1, params, opt_state), said(state, sums, squares)
        if pipeline is not None:
            of_all = partial(loss, partial(sums_of_all, objective, pipeline))
            several = partial(in_one_pass, dtype=compute) if len(keys) > 1 else at_once
            grads, sums = several(of_all, at, batch, keys, axes)
        elif len(keys) == 1:
            one = jax.tree.map(lambda x: x[0], batch)
            grads, sums = at_once(partial(loss, objective), at, one, keys[0], axes)
        else:
            grads, sums = accumulated(partial(loss, objective), at, batch, keys, axes, compute)
        count = jnp.maximum(sums["count"], 1.0)
        grads = jax.tree.map(lambda g: (g.astype(jnp.float32) / (count * scale)).astype(g.dtype), grads)
        squares = nonfinite.squares(grads, axes, some)
        metrics = said(state, sums, squares)
        norm = metrics["gradient_norm"]
        if state.loss_scale is None and not skip:
            return TrainState(state.step + 1, *updated(grads)), metrics
        finite = jnp.isfinite(norm)
        params, opt_state = jax.lax.cond(finite, updated, lambda _: (state.params, state.opt_state), grads)
        if state.loss_scale is None:
            metrics |= {"skipped": 1 - finite.astype(jnp.int32)}
            return TrainState(state.step + 1, params, opt_state), metrics
        loss_scale = scaling.after(state.loss_scale, finite, dynamic=precision.loss_scale == "dynamic")
        metrics |= {"loss_scale": loss_scale.scale, "skipped": loss_scale.skipped}
        return TrainState(state.step + 1, params, opt_state, loss_scale), metrics

    return step
