"""`memory.update: during` on pipeline stages: a stage updates each of its layers in the backward pass of the last
micro-batch, when the gradient of the layer is complete.

With one micro-batch, the gradients of one layer exist at a time. With several, the schedule needs the float32 sums of
all layers of a stage; the update then takes the temporary buffers of one layer. Embedding and output matrices, and
first layers of another kind, are updated after the loop one after the other (`update_singly`), from their sums over the
stages.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxmem import optim
from jaxmem.optim.apply import Writer, sum_of_squares
from jaxmem.optim.groups import ParameterGroup, constrain_tree
from jaxmem.quant.precision import Params
from jaxmem.sharding.table import is_axes, is_stacked
from jaxmem.sharding.trees import fill, merge, single_weights, without
from jaxmem.stack.reverse import Visitor
from jaxmem.step import nonfinite
from jaxmem.step.objective import Batch, Sums, objective_of
from jaxmem.step.pipeline import PipelineResult, StageArrays, StageVisit, VisitOfStage, execute, stacks_of
from jaxmem.step.state import StateSpec, TrainState
from jaxmem.step.update_piecewise import LayerUpdate, StackUpdate, Updated, add_squares, update_singly
from jaxmem.typing import Tree


def update_in_stages(
    spec: StateSpec, state: TrainState, batch: Batch, keys: jax.Array, write: Writer
) -> tuple[Params, Tree, Sums, jax.Array]:
    """One update. Arguments and results are those of `update_during_backward`."""
    model = spec.model
    params = state.params
    pipeline = model.execution.pipeline
    name = stacks_of(model)[-1]
    assert pipeline is not None
    trainable = model.select(params)
    axes = model.select(model.axes)
    stack = {name: trainable[name]}
    outside = without(trainable, [(name,)])
    outside_axes = without(axes, [(name,)])
    groups = [spec.group(weight) for weight in single_weights(stack)]

    def run(visit: StageVisit) -> tuple[PipelineResult, Tree]:
        """Also returns the mean gradients outside of the stages' layers."""
        result = execute(spec, pipeline.timetable, objective_of(spec.cfg), params, (batch, keys), visit=visit)
        grads = constrain_tree(result.outside, outside_axes, "gradients")
        return result, _mean(grads, result.sums["count"])

    def measure(stage: StageArrays) -> VisitOfStage:
        """Adds up the squares of the gradients of a stage."""

        def visit(squares: jax.Array, _: jax.Array, dw: Tree, __: None) -> jax.Array:
            return add_squares(squares, groups, {name: _mean(dw, stage.count)})

        return Visitor(jnp.zeros((), jnp.float32), lambda _: stage.weights, visit), lambda squares: (squares[None], ())

    def update(stage: StageArrays) -> VisitOfStage:
        """Updates the layers of a stage."""
        norm, unstacked = stage.values
        before = map(fill, stage.stacked, unstacked)
        stacks = [
            StackUpdate(group, group_state, write, norm, pipeline.stored, stage.first_layer)
            for group, group_state in zip(groups, before, strict=True)
        ]
        layers = LayerUpdate(stacks)
        trainable_weights = jax.tree.map(
            lambda x, w: None if x is None else w, stack[name], stage.weights, is_leaf=lambda x: x is None
        )

        def weights(carry: Updated) -> Tree:
            return merge({name: stage.weights}, carry.weights)[name]

        def visit(carry: Updated, layer: jax.Array, dw: Tree, _: None) -> Updated:
            return layers.update_layer(carry, layer, {name: _mean(dw, stage.count)})

        def end(carry: Updated) -> tuple[Updated, list[Tree]]:
            stacked, unstacked = _divide(groups, carry.states)
            return carry._replace(states=stacked), unstacked

        begin = layers.initial_carry({name: trainable_weights}, pipeline.stored // pipeline.stages)
        return Visitor(begin, weights, visit), end

    norm = None
    if spec.cfg.needs_global_norm_first:
        measured, grads = run(StageVisit((), (), measure))
        norm = jnp.sqrt(jnp.sum(measured.of_layers) + sum_of_squares(grads))
    stacked, unstacked = _divide(groups, [group.state(state.opt_state) for group in groups])
    result, grads = run(StageVisit(stacked, (norm, unstacked), update))
    layers: Updated = result.of_layers
    new_outside, new_states = update_singly(spec, outside, grads, state.opt_state, write, norm)
    new_states += map(fill, layers.states, result.values)
    zeros = jax.tree.map(lambda _: 0, axes, is_leaf=is_axes)
    all_squares = merge(zeros, layers.squares, nonfinite.sums_of_squares(grads, outside_axes))
    squares = spec.backward_order.sort(all_squares)
    opt_state = optim.record_norm(merge(state.opt_state, *new_states), jnp.sqrt(jnp.sum(squares)))
    return merge(params, layers.weights, *new_outside), opt_state, result.sums, squares


def _mean(grads: Tree, count: jax.Array) -> Tree:
    return jax.tree.map(lambda g: g.astype(jnp.float32) / jnp.maximum(count, 1.0), grads)


def _divide(groups: Sequence[ParameterGroup], states: Sequence[Tree]) -> tuple[list[Tree], list[Tree]]:
    """For the state of each group, the leaves that are stacked, and those that are not; None for others."""
    axes = [group.state_axes for group in groups]

    def leaves(of_stacks: bool) -> list[Tree]:
        select = lambda names, x: x if is_stacked(names) == of_stacks else None  # noqa: E731
        return jax.tree.map(select, axes, states, is_leaf=is_axes)

    return leaves(of_stacks=True), leaves(of_stacks=False)
