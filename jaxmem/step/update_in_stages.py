"""`memory.update: during` on pipeline stages: a stage updates each of its layers in the backward pass of the last
micro-batch, when the gradient of the layer is complete.

With one micro-batch, the gradients of one layer exist at a time. With several, the schedule needs the float32 sums of
all layers of a stage; the update then takes the temporary buffers of one layer. Embedding and output matrices, and
first layers of another kind, are updated after the loop in parts (`update_in_parts.py`), from their sums over the
stages.
"""

import jax
import jax.numpy as jnp

from jaxmem import optim
from jaxmem.optim.apply import sum_of_squares
from jaxmem.optim.groups import Write, constrain_tree, merge, single_weights, without
from jaxmem.quant.precision import Params
from jaxmem.sharding import is_axes
from jaxmem.stack import Visitor
from jaxmem.step import nonfinite
from jaxmem.step.objective import Batch, Sums, objective
from jaxmem.step.pipeline import StageArrays, StageVisit, Visited, VisitOfStage, execute, stacks_of
from jaxmem.step.state import StateSpec, TrainState
from jaxmem.step.update_in_parts import LayerUpdate, add_squares, update_singly
from jaxmem.typing import Tree


def update_in_stages(
    spec: StateSpec, state: TrainState, batch: Batch, keys: jax.Array, write: Write
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
    outside = without(trainable, stack)
    outside_axes = without(axes, stack)
    groups = [spec.group(weight) for weight in single_weights(stack)]
    state_axes = [group.state_axes for group in groups]

    def run(visit: StageVisit) -> tuple[Visited, Tree, Sums]:
        """Returns the results of the visit, the mean gradients outside of the stages' layers, and the sums."""
        result = execute(spec, pipeline.timetable, objective(spec.cfg), params, (batch, keys), visit=visit)
        assert result.visited is not None
        grads = constrain_tree(result.outside, outside_axes, "gradients")
        return result.visited, _mean(grads, result.sums["count"]), result.sums

    def measure(stage: StageArrays) -> VisitOfStage:
        """Adds up the squares of the gradients of a stage."""

        def visit(squares: jax.Array, _: jax.Array, dw: Tree, __: None) -> jax.Array:
            return add_squares(squares, groups, {name: _mean(dw, stage.count)})

        return Visitor(jnp.zeros((), jnp.float32), lambda _: stage.weights, visit), lambda squares: (squares[None], ())

    def update(stage: StageArrays) -> VisitOfStage:
        """Updates the layers of a stage."""
        norm, unstacked = stage.values
        before = [_joined(*parts) for parts in zip(stage.stacked, unstacked, strict=True)]
        layers = LayerUpdate(groups, before, write, norm, pipeline.stored, stage.first_layer)
        trainable_weights = jax.tree.map(
            lambda x, w: None if x is None else w, stack[name], stage.weights, is_leaf=_is_none
        )

        def visit(carry: Tree, layer: jax.Array, dw: Tree, _: None) -> Tree:
            return layers(carry, layer, {name: _mean(dw, stage.count)})

        def end(carry: Tree) -> tuple[Tree, Tree]:
            weights, states, squares = carry
            parts = [_separated(axes, state) for axes, state in zip(state_axes, states, strict=True)]
            return (weights, [stacked for stacked, _ in parts], squares), [unstacked for _, unstacked in parts]

        begin = layers.initial_carry({name: trainable_weights}, pipeline.stored // pipeline.stages)
        return Visitor(begin, lambda carry: merge({name: stage.weights}, carry[0])[name], visit), end

    norm = None
    if spec.cfg.needs_global_norm_first:
        measured, grads, _ = run(StageVisit((), (), measure))
        norm = jnp.sqrt(jnp.sum(measured.stacked) + sum_of_squares(grads))
    parts = [_separated(group.state_axes, group.state(state.opt_state)) for group in groups]
    visit = StageVisit([stacked for stacked, _ in parts], (norm, [unstacked for _, unstacked in parts]), update)
    updated, grads, sums = run(visit)
    new_layers, stacked, squares = updated.stacked
    unstacked = updated.values
    new, states = update_singly(spec, outside, grads, state.opt_state, write, norm)
    states += [_joined(*parts) for parts in zip(stacked, unstacked, strict=True)]
    zeros = jax.tree.map(lambda _: 0, axes, is_leaf=is_axes)
    squares = merge(zeros, squares, nonfinite.sums_of_squares(grads, outside_axes))
    squares = nonfinite.in_backward_order(squares, axes)
    opt_state = optim.record_norm(merge(state.opt_state, *states), jnp.sqrt(jnp.sum(squares)))
    return merge(params, new_layers, *new), opt_state, sums, squares


def _mean(grads: Tree, count: jax.Array) -> Tree:
    return jax.tree.map(lambda g: g.astype(jnp.float32) / jnp.maximum(count, 1.0), grads)


def _separated(axes: Tree, tree: Tree) -> tuple[Tree, Tree]:
    """The leaves that are stacked, and the others; None for leaves of the other tree."""
    is_stacked = jax.tree.map(lambda names: names[:1] == ("layer",), axes, is_leaf=is_axes)
    stacked = jax.tree.map(lambda stacked, x: x if stacked else None, is_stacked, tree)
    return stacked, jax.tree.map(lambda stacked, x: None if stacked else x, is_stacked, tree)


def _joined(tree: Tree, others: Tree) -> Tree:
    return jax.tree.map(lambda x, other: other if x is None else x, tree, others, is_leaf=_is_none)


def _is_none(x: object) -> bool:
    return x is None
