"""One update: batch -> loss -> gradients -> update -> metrics.

With P parameters in float32 and Adam, an update needs 4 P bytes of weights, 8 P of moments and 4 P of gradients, each
divided by the number of devices over which it is sharded. A scan over micro-batches accumulates gradients in one
buffer, so activations exist for one micro-batch at a time, for any batch size. Pipeline stages process all
micro-batches in one pass.

In order, with the function that does it (training/run.py follows a batch to the step and its metrics from there):

1. Loss: `Objective` (objective.py) runs the parts of the network, of which the stacks of layers are applied by
   `stack.apply.apply_call`, then the output projection and the loss. It returns sums over tokens or rows.
2. Gradients: `_gradients` differentiates the loss with respect to proxies of the trainable weights: arrays of the
   gradient's dtype in place of weights that may be quantized or sharded (`sharding.weights`). The network reads its
   weights, and gathers or dequantizes them, where it uses them (`sharding.gathering.gather`). Several micro-batches:
   `gradients.accumulate`; pipeline stages: `pipeline.pipeline_gradients`.
3. Norms: `BackwardOrder.squared_norms` has one for each weight, in a stack one for each layer, for the norm of the
   gradient and for the name of the first gradient that is not finite.
4. Metrics: `_metrics`, the sums divided by their count. They need the weights and the state before the update.
5. Update: `_update` applies the optimizer (`ParameterGroup.compute_updates`): clipping, the rule, weight decay and
   learning rate. `optim.apply_updates` adds the result to the weights, and `gather_in_place` gathers them if each
   device updates a smaller shard than it stores (zero 1 and 2; zero 3 with `rules.optimizer`).

`memory.update: during` has 1, 2, 3 and 5 in one backward pass: update_during.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import optax

from jaxmem import optim
from jaxmem.errors import UserError
from jaxmem.optim.groups import constrain_tree
from jaxmem.optim.in_place import gather_in_place
from jaxmem.quant.precision import Params
from jaxmem.sharding.gathering import stored_axes
from jaxmem.sharding.trees import merge
from jaxmem.sharding.weights import apply_hooks, differentiable, with_gradients
from jaxmem.step import nonfinite
from jaxmem.step.gradients import accumulate
from jaxmem.step.objective import FORWARD_STATE, Batch, Sums, means, objective_of
from jaxmem.step.state import StepSpec, TrainState, next_loss_scale
from jaxmem.typing import Tree

if TYPE_CHECKING:
    from jaxmem.optim.apply import Writer

Metrics = dict[str, jax.Array]
_ROUNDING_KEY = 2**31 - 1  # folded into the key of a step: stochastic rounding uses other random bits than dropout


def make_step(spec: StepSpec) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """The training step. Leaves of a batch are [micro-batches, rows, ...]."""
    cfg = spec.cfg

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(spec.key, state.step)
        row_keys = jax.random.split(key, batch["mask"].shape[:2])
        rounding = jax.random.fold_in(key, _ROUNDING_KEY) if cfg.precision.stochastic_rounding else None
        write = partial(optim.apply_updates, key=rounding, kernel=spec.update_kernel)
        if cfg.memory.update == "during":
            params, opt_state, sums, squares = _update_during(spec, state, batch, row_keys, write)
            return TrainState(state.step + 1, params, opt_state), _metrics(spec, state, sums, squares)
        grads, sums = _gradients(spec, state, batch, row_keys)
        new_forward_state = sums.pop(FORWARD_STATE, None)
        squares = spec.backward_order.squared_norms(grads)
        metrics = _metrics(spec, state, sums, squares)
        norm = metrics["gradient_norm"]
        can_skip = state.loss_scale is not None or cfg.train.on_nan == "skip"
        finite = jnp.isfinite(norm) & jnp.isfinite(metrics["loss"]) if can_skip else None
        params, opt_state = _update(spec, state, grads, norm, write, new_forward_state, finite)
        scale = None
        if finite is not None and state.loss_scale is not None:
            scale = next_loss_scale(state.loss_scale, finite, dynamic=cfg.precision.loss_scale == "dynamic")
            metrics |= {"loss_scale": state.loss_scale.scale, "skipped": scale.skipped}
        elif finite is not None:
            metrics |= {"skipped": 1 - finite.astype(jnp.int32)}
        return TrainState(state.step + 1, params, opt_state, scale), metrics

    return step


def _update_during(
    spec: StepSpec, state: TrainState, batch: Batch, row_keys: jax.Array, write: Writer
) -> tuple[Params, Tree, Sums, jax.Array]:
    """Gradients and updates in one backward pass: `update_during_backward`, on pipeline stages `update_in_stages`."""
    if spec.model.forward_state:
        name = ".".join(min(spec.model.forward_state))
        raise UserError(
            f"memory.update=during does not support {name}, which the forward pass changes (BatchNorm); use"
            " memory.update=after, or layers without such state, e.g. nnx.GroupNorm or nnx.LayerNorm"
        )
    if spec.model.execution.pipeline is not None:
        from jaxmem.step.pipeline import update_in_stages

        return update_in_stages(spec, state, batch, row_keys, write)
    from jaxmem.step.update_during import update_during_backward

    return update_during_backward(spec, state, batch, row_keys, write)


def _gradients(spec: StepSpec, state: TrainState, batch: Batch, row_keys: jax.Array) -> tuple[Params, Sums]:
    """Gradients of the mean loss with respect to the trainable parameters, and the sums of the objective."""
    cfg = spec.cfg
    model = spec.model
    objective = objective_of(cfg)
    partial_stacks = model.selection.partial_stacks
    axes = model.select(model.axes)
    scale = jnp.float32(1)
    if state.loss_scale:  # the scale is for the mean loss of a micro-batch, but objectives return sums
        scale = state.loss_scale.scale / objective.count_losses(batch["mask"][0])

    def loss(proxies: Params, batch: Batch, keys: jax.Array) -> tuple[jax.Array, Sums]:
        """The loss of a micro-batch."""
        before = model.with_forward_state(state.params, batch.get(FORWARD_STATE))
        network = model.bind(with_gradients(before, proxies, partial_stacks))
        sums = objective(network, {name: x for name, x in batch.items() if name != FORWARD_STATE}, keys)
        if model.forward_state:
            sums = sums | {FORWARD_STATE: network.state}
        return objective.trained_sum(sums) * scale, sums

    proxies = differentiable(model.select(state.params), spec.gradient_dtype)
    micro_batch, keys = jax.tree.map(lambda x: x[0], (batch, row_keys))
    if model.execution.pipeline is not None:
        from jaxmem.step.pipeline import pipeline_gradients

        grads, sums = pipeline_gradients(spec, state.params, batch, row_keys, scale)
    elif len(row_keys) == 1:
        grads, sums = jax.grad(loss, has_aux=True)(proxies, micro_batch, keys)
        # XLA reduce-scatters each gradient as soon as it is computed, and no device stores a full gradient.
        grads = constrain_tree(grads, axes, "gradients")
    else:
        of_micro_batch = loss
        if not cfg.user.is_empty:  # the loss of a script may use the weights of layers several times
            from jaxmem.step.parts import applies_hooks_by_layer

            if partial_stacks or not applies_hooks_by_layer(loss, proxies, micro_batch, keys, axes):
                # Each weight's gradients are added to the sum once, when that of all its uses is complete.
                of_micro_batch = lambda proxies, *inputs: loss(apply_hooks(proxies), *inputs)  # noqa: E731
        dtype = None if objective.needs_all_rows else model.execution.dtype
        begin = model.forward_state_of(state.params)
        grads, sums = accumulate(of_micro_batch, proxies, batch, row_keys, axes, dtype, begin)
    divisor = jnp.maximum(sums["count"], 1.0) * scale
    return jax.tree.map(lambda g: (g.astype(jnp.float32) / divisor).astype(g.dtype), grads), sums


def _update(
    spec: StepSpec,
    state: TrainState,
    grads: Params,
    norm: jax.Array,
    write: Writer,
    new_forward_state: Tree,
    finite: jax.Array | None,
) -> tuple[Params, Tree]:
    """Returns new parameters and optimizer state.

    Args:
        spec: the specification of the step.
        state: the state before the update.
        grads: the gradients.
        norm: their norm.
        write: adds updates to weights.
        new_forward_state: what the forward pass changed.
        finite: whether the gradients are finite; otherwise nothing changes. None: not tested.
    """
    model = spec.model
    params = model.select(state.params)
    stored = stored_axes(spec.trainable.axes, params)
    on_host = spec.offloads("optimizer")

    def update(grads: Params) -> tuple[Params, Tree, Tree]:
        if on_host:
            from jaxmem.step.update_piecewise import update_singly

            new, states = update_singly(spec, params, grads, state.opt_state, write, norm)
            opt_state = optim.record_norm(merge(state.opt_state, *states), norm)
            return merge(params, *new), opt_state, new_forward_state
        # With the norm that the metrics have, XLA reads the gradients once for both; otherwise it would sum them again
        # while it clips them, and could not clip them in place.
        updates, opt_state = spec.trainable.compute_updates(grads, state.opt_state, params, norm=norm)
        return write(params, updates, axes=spec.trainable.axes), opt_state, new_forward_state

    def skip(_: Params) -> tuple[Params, Tree, Tree]:
        same = params if on_host else constrain_tree(params, stored, "optimizer")
        return same, state.opt_state, model.forward_state_of(state.params) if new_forward_state else new_forward_state

    new, opt_state, forward_state = update(grads) if finite is None else jax.lax.cond(finite, update, skip, grads)
    if not on_host:
        # The cast runs in the sharding of the optimizer state, before the all-gather; otherwise float32 would be sent.
        # The all-gather comes after the cond: XLA would copy the old weights if its loop were in a branch of the cond.
        new = gather_in_place(params, constrain_tree(new, stored, "optimizer"), stored)
    return model.with_forward_state(model.selection.merge(state.params, new), forward_state), opt_state


def _metrics(spec: StepSpec, state: TrainState, sums: Sums, squares: jax.Array) -> Metrics:
    rate = {} if spec.cfg.user.optimizer else {"learning_rate": spec.learning_rate(_schedule_step(state))}
    return (
        means(sums)
        | rate
        | {
            "count": sums["count"],
            nonfinite.METRIC: nonfinite.first(squares),
            "gradient_norm": jnp.sqrt(jnp.sum(squares)),
        }
    )


def _schedule_step(state: TrainState) -> jax.Array:
    """The number of earlier updates by which the optimizer computes its learning rate: without skipped ones."""

    def is_schedule(node: Tree) -> bool:
        return isinstance(node, optax.ScaleByScheduleState)

    nodes = jax.tree.leaves(state.opt_state, is_leaf=is_schedule)
    return next((node.count for node in nodes if is_schedule(node)), state.step)
