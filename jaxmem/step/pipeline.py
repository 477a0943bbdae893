"""An update, or an evaluation, of all micro-batches over pipeline stages (`pipeline.loop`).

The vocabulary of the embedding and of the output projection is sharded over the stages, which compute the embedding and
the loss together. Other weights outside of the layers are replicated over the stages, like their gradients. If a model
has several stacks of layers, those before the last one are part of the embedding.

Devices that process different rows and need the sum of their gradients (`Layout.local_gradient_axes`) sum them once,
after the loop: the `jax.shard_map` is over these axes too.

With `memory.update: during` (`update_in_stages`), a stage updates each of its layers in the backward pass of the last
micro-batch, when the gradient of the layer is complete. With one micro-batch, the gradients of one layer exist at a
time. With several, the schedule needs the float32 sums of all layers of a stage; the update then takes the temporary
buffers of one layer. Embedding and output matrices, and first layers of another kind, are updated after the loop one
after the other (`update_singly`), from their sums over the stages.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict

from jaxmem import optim
from jaxmem.config.names import split_stack
from jaxmem.models.network import Layers, NetworkPart, run_parts
from jaxmem.optim.apply import Writer, sum_of_squares
from jaxmem.optim.groups import ParameterGroup, constrain_tree
from jaxmem.pipeline.loop import AXIS, PipelineNetwork, run
from jaxmem.pipeline.stage_layers import LayersOfStage
from jaxmem.pipeline.timetable import Timetable, evaluation
from jaxmem.quant.precision import Params
from jaxmem.sharding.arrays import map_stages, vocab_parts
from jaxmem.sharding.gathering import stored_axes
from jaxmem.sharding.layout import Layout, current
from jaxmem.sharding.table import Axes, is_axes, is_stacked
from jaxmem.sharding.trees import fill, merge, single_weights, without
from jaxmem.sharding.weights import differentiable, with_gradients
from jaxmem.stack.call import StackCall
from jaxmem.stack.reverse import Visitor, differentiable_weights
from jaxmem.step import nonfinite
from jaxmem.step.gradients import Reduce
from jaxmem.step.model import ModelSpec
from jaxmem.step.objective import Batch, Objective, Sums, objective_of
from jaxmem.step.parts import parts_of
from jaxmem.step.state import StepSpec, TrainState
from jaxmem.step.update_piecewise import LayerUpdate, StackUpdate, Updated, add_squares, update_singly
from jaxmem.typing import Tree


@dataclass(frozen=True)
class StageArrays:
    """What a visit receives on one stage."""

    weights: Tree  # the weights of its layers
    stacked: Tree  # the stage's part of `StageVisit.stacked`
    values: Tree  # `StageVisit.values`
    first_layer: jax.Array  # the index of its first layer
    count: jax.Array  # the count of the objective, of all micro-batches


# The visitor of the layers of a stage, and a function: last carry -> new `stacked` and new `values`
VisitOfStage = tuple[Visitor, Callable[[Tree], tuple[Tree, Tree]]]


@dataclass(frozen=True)
class StageVisit:
    """What a stage does with the gradients of its layers besides adding them up."""

    stacked: Tree  # arrays whose first dimension is sharded over the stages
    values: Tree  # arrays that are the same on all stages
    visitor: Callable[[StageArrays], VisitOfStage]


@dataclass(frozen=True)
class PipelineResult:
    """The results of a schedule. Gradients are float32 sums over micro-batches; with `Layout.local_gradient_axes` they
    have a first dimension, one element for each device along these axes."""

    outside: Tree  # gradients of the weights outside of the stages' layers
    sums: Sums
    of_layers: Tree  # what the stages return for their layers: the gradients, or the new `stacked` of a visit
    values: Tree  # the new `values` of a visit


def pipeline_gradients(
    spec: StepSpec, params: Params, batch: Batch, keys: jax.Array, scale: jax.Array
) -> tuple[Params, Sums]:
    """The gradients of all micro-batches; they are communicated in the compute dtype.

    Args:
        spec: the specification of the step.
        params: all weights.
        batch: arrays [micro-batches, rows, ...].
        keys: the random key of each row, [micro-batches, rows].
        scale: the factor of the loss.

    Returns:
        Float32 gradients of the sum of the losses, times `scale`, and the sums of the objective.
    """
    model = spec.model
    layout = current()
    assert layout is not None
    assert model.execution.pipeline is not None
    objective = objective_of(spec.cfg)
    local = _local_axes(layout, objective)
    result = execute(spec, model.execution.pipeline.timetable, objective, params, (batch, keys), scale)
    axes = model.select(model.axes)
    dtype = model.execution.dtype
    stack = stacks_of(model)[-1]
    grads = {**result.outside, stack: result.of_layers}
    if not local:
        return constrain_tree(grads, axes, "gradients"), result.sums

    def reduce(names: Axes, g: jax.Array) -> jax.Array:
        return Reduce(layout, names, local, dtype).reduce_groups(g).astype(jnp.float32)

    return jax.tree.map(reduce, axes, grads, is_leaf=is_axes), result.sums


def _local_axes(layout: Layout, objective: Objective) -> tuple[str, ...]:
    """The mesh axes along which each device has the loss and the gradients of its own rows."""
    return () if objective.needs_all_rows else layout.local_gradient_axes


def pipeline_sums(spec: StepSpec, objective: Objective, params: Params, batch: Batch) -> Sums:
    """The sums of the objective over all micro-batches, [micro-batches, rows, ...]."""
    p = spec.model.execution.pipeline
    assert p is not None
    return execute(spec, evaluation(p.stages, p.micro_batches, p.rounds), objective, params, (batch, None)).sums


def execute(
    spec: StepSpec,
    table: Timetable,
    objective: Objective,
    params: Params,
    batch: tuple[Batch, jax.Array | None],
    scale: jax.Array | float = 1.0,
    visit: StageVisit | None = None,
) -> PipelineResult:
    """Executes a schedule.

    Args:
        spec: the specification of the step.
        table: the schedule.
        objective: the loss of a micro-batch.
        params: all weights.
        batch: arrays [micro-batches, rows, ...], and the random key of each row or None.
        scale: the factor of the loss.
        visit: receives the gradients of layers. Devices that process different rows then sum them in every backward
            pass.
    """
    model = spec.model
    layout = current()
    gradient_dtype = spec.gradient_dtype if table.has_backward else None
    pipeline = model.execution.pipeline
    name = stacks_of(model)[-1]
    assert layout is not None
    assert pipeline is not None
    local = _local_axes(layout, objective) if visit is None else ()
    learns = jax.tree.map(lambda x: x is not None, model.select(model.axes), is_leaf=lambda x: x is None or is_axes(x))

    def stage(arrays: Tree, outside: Tree, batch: Tree, replicated: Tree) -> tuple[Tree, Tree, tuple[Sums, Tree]]:
        """Returns what each stage has for its layers (gradients, or the new `stacked`), the gradients outside of them,
        and what is equal on all stages: the sums and the new `values`."""
        with layout.inside_shard_map((AXIS, *local)):
            of_layers, of_outside, sums, values = run_stage(arrays, outside, batch, replicated)
            if local:
                of_layers, of_outside = jax.tree.map(lambda x: x[None], (of_layers, of_outside))
                sums = jax.lax.psum(sums, local)
            return of_layers, of_outside, (sums, values)

    def run_stage(arrays: Tree, outside: Tree, batch: Tree, replicated: Tree) -> tuple[Tree, Tree, Sums, Tree]:
        layers, stacked = arrays
        scale, values = replicated
        trainable = jax.tree.map(lambda learns, w: w if learns else None, without(learns, [(name,)]), outside)
        proxies = differentiable(trainable, gradient_dtype)

        def embed(proxies: Tree, micro: Tree) -> StackCall:
            network, before, stack, _ = parts(proxies, micro)
            return stack.call(network, run_parts(network, before))

        def loss(proxies: Tree, y: Tree, micro: Tree) -> tuple[jax.Array, Sums]:
            network, before, _, after = parts(proxies, micro)
            sums = run_parts(network, after, run_parts(network, before)._replace(x=y))
            return objective.trained_sum(sums) * scale, sums

        def parts(proxies: Tree, micro: Tree) -> tuple[Any, Sequence[NetworkPart], Layers, Sequence[NetworkPart]]:
            """The network, and its parts before the last stack, this stack, and the parts after it."""
            weights = {**with_gradients(outside, proxies), name: layers}
            network = model.bind(weights)
            parts = parts_of(objective, model.bind, weights, *micro)
            last = max(number for number, part in enumerate(parts) if isinstance(part, Layers))
            stack = parts[last]
            assert isinstance(stack, Layers)
            return network, parts[:last], stack, parts[last + 1 :]

        def count(micro: Tree) -> jax.Array:
            """The count of a micro-batch. It is known before the loop, since it depends on the batch only."""
            return loss(proxies, jax.tree.map(jnp.zeros_like, embed(proxies, micro).x), micro)[1]["count"]

        network = PipelineNetwork(embed, loss, proxies, batch)
        stage_layers = LayersOfStage(pipeline, layers, differentiable_weights(learns[name], gradient_dtype))
        if visit is None:
            results = run(table, network, stage_layers)
            return results.layers.sums, results.outside, results.sums, ()
        first_layer = jax.lax.axis_index(AXIS) * (pipeline.group * pipeline.rounds)
        total = jnp.sum(jax.lax.map(count, batch))
        visitor, end = visit.visitor(StageArrays(layers, stacked, values, first_layer, total))
        results = run(table, network, replace(stage_layers, visitor=visitor))
        new_stacked, new_values = end(results.layers.visitor_carry)
        return new_stacked, results.outside, results.sums, new_values

    outside = without(params, [(name,)])
    axes = without(model.axes, [(name,)])
    stacked, values = ((), ()) if visit is None else (visit.stacked, visit.values)
    on_stage = partial(vocab_parts, AXIS)
    stored = jax.tree.map(on_stage, stored_axes(axes, outside), outside, is_leaf=is_axes)
    trained = [without(model.select(tree), [(name,)]) for tree in (model.axes, params)]
    gradient_shardings = jax.tree.map(on_stage, *trained, is_leaf=is_axes) if table.has_backward else ()
    arrays = (params[name], stacked), outside, batch, (jnp.float32(scale), values)
    of_layers, of_outside, (sums, new_values) = map_stages(stage, AXIS, local, stored, gradient_shardings)(*arrays)
    return PipelineResult(of_outside, sums, of_layers, new_values)


def update_in_stages(
    spec: StepSpec, state: TrainState, batch: Batch, keys: jax.Array, write: Writer
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
        trainable_weights = jax.tree.map(
            lambda x, w: None if x is None else w, stack[name], stage.weights, is_leaf=lambda x: x is None
        )

        count = pipeline.stored // pipeline.stages
        visitor = LayerUpdate(stacks).visitor((name,), stage.weights, {name: trainable_weights}, count)

        def visit(carry: Updated, layer: jax.Array, dw: Tree, fetched: None) -> Updated:
            return visitor.visit(carry, layer, _mean(dw, stage.count), fetched)

        def end(carry: Updated) -> tuple[Updated, list[Tree]]:
            stacked, unstacked = _divide(groups, carry.states)
            return carry._replace(states=stacked), unstacked

        return replace(visitor, visit=visit), end

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


def stacks_of(model: ModelSpec) -> list[str]:
    """The names of the stacks of layers, in order; pipeline stages share the layers of the last one."""
    names = {path[0] for path, axes in flatten_dict(model.axes).items() if is_stacked(axes)}
    return sorted(names, key=lambda name: (split_stack(name)[1] or range(1)).start)
