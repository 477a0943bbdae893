"""`memory.update: during` on pipeline stages: a stage updates each of its layers in the backward pass of the last
micro-batch, when the gradient of the layer is complete.

With one micro-batch, the gradients of one layer exist at a time. With several, the schedule needs the float32 sums of
all layers of a stage; the update then takes the temporary buffers of one layer. Embedding and output matrices, and
first layers of another kind, are updated after the loop in parts (`update_in_parts.py`), from their sums over the
stages.
"""

from typing import Any

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
from jaxmem.step.pipeline import StageVisit, execute, stacks_of
from jaxmem.step.state import StateSpec, TrainState
from jaxmem.step.update_in_parts import LayerUpdate, add_squares, update_singly

Tree = Any


def update_in_stages(
    spec: StateSpec, state: TrainState, batch: Batch, keys: jax.Array, write: Write
) -> tuple[Params, Any, Sums, jax.Array]:
    """Returns new parameters, new optimizer state, the sums of the objective, and the squared norms of the gradients in
    the order of `nonfinite.gradient_names`. Leaves of the batch, and `keys`, are [micro-batches, rows, ...]."""
    model, params = spec.model, state.params
    pipeline, (*_, name) = model.pipeline, stacks_of(model)
    assert pipeline is not None
    trainable, axes = model.select(params), model.select(model.axes)
    stack = {name: trainable[name]}
    outside, outside_axes = without(trainable, stack), without(axes, stack)
    groups = [spec.group(weight) for weight in single_weights(stack)]
    state_axes = [group.state_axes for group in groups]

    def run(visit: StageVisit) -> tuple[Any, Tree, Sums, Any]:
        """Returns the new `stacked`, the gradients outside of the stages' layers, the sums, and the new `values`."""
        found = execute(spec, pipeline.timetable, objective(spec.cfg), params, (batch, keys), visit=visit)
        sums, values = found.sums
        grads = constrain_tree(found.outside, outside_axes, "gradients")
        return found.layers, _mean(grads, sums["count"]), sums, values

    def measure(weights: Tree, _: Tree, __: Tree, ___: jax.Array, count: jax.Array) -> Any:
        """Adds up the squares of the gradients of a stage."""

        def visit(squares: jax.Array, _: jax.Array, dw: Tree, __: None) -> jax.Array:
            return add_squares(squares, groups, {name: _mean(dw, count)})

        return Visitor(jnp.zeros((), jnp.float32), lambda _: weights, visit), lambda squares: (squares[None], ())

    def update(weights: Tree, stacked: Tree, values: Tree, first: jax.Array, count: jax.Array) -> Any:
        """Updates the layers of a stage."""
        norm, unstacked = values
        before = [_joined(*parts) for parts in zip(stacked, unstacked, strict=True)]
        layers = LayerUpdate(groups, before, write, norm, pipeline.stored, first)
        own = {name: jax.tree.map(lambda x, w: None if x is None else w, stack[name], weights, is_leaf=_is_none)}

        def visit(carry: Any, layer: jax.Array, dw: Tree, _: None) -> Any:
            return layers(carry, layer, {name: _mean(dw, count)})

        def end(carry: Any) -> Any:
            weights, states, squares = carry
            each = [_separated(*one) for one in zip(state_axes, states, strict=True)]
            return (weights, [stacked for stacked, _ in each], squares), [unstacked for _, unstacked in each]

        begin = layers.initial_carry(own, pipeline.stored // pipeline.stages)
        return Visitor(begin, lambda carry: merge({name: weights}, carry[0])[name], visit), end

    norm = None
    if spec.cfg.needs_global_norm_first:
        squares, grads, *_ = run(StageVisit((), (), measure))
        norm = jnp.sqrt(jnp.sum(squares) + sum_of_squares(grads))
    each = [_separated(group.state_axes, group.state(state.opt_state)) for group in groups]
    visit = StageVisit([stacked for stacked, _ in each], (norm, [unstacked for _, unstacked in each]), update)
    (new_layers, stacked, squares), grads, sums, unstacked = run(visit)
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
    stacked = jax.tree.map(lambda own, x: x if own else None, is_stacked, tree)
    return stacked, jax.tree.map(lambda own, x: None if own else x, is_stacked, tree)


def _joined(tree: Tree, others: Tree) -> Tree:
    return jax.tree.map(lambda x, other: other if x is None else x, tree, others, is_leaf=_is_none)


def _is_none(x: Any) -> bool:
    return x is None
