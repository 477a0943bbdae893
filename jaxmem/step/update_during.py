"""`memory.update: during`: each layer is updated in the backward pass, as soon as its gradient is computed.

The backward pass goes through the layers from the last to the first. A layer's gradient is computed, its weights and
its part of the optimizer state are read, updated and written in place, and the gradient is freed. With P parameters in
N layers, gradients take P / N values instead of P, for any optimizer; the results are identical to updating after the
backward pass (Lv et al., arXiv:2306.09782). With micro-batches, a layer is backpropagated through all of them before
it is updated.

An update, in the order in which it is computed:

1. `by_parts.forward_by_parts`: the forward pass, part by part: functions, stacks of layers, and operations with an
   embedding or output matrix.
2. `_gradient_norm`, only for an optimizer that needs the norm of all gradients before the first update (clipping by the
   global norm): a backward pass that discards the gradients.
3. The gradients of the loss, and the update of the parameters after the layers: the final norm (`update_unstacked`).
4. `ForwardByParts.backward`: back through the parts. For a stack (`update_stack`), `stack.reverse.ForwardPass.backward`
   loops over the layers from the last one: it computes the gradient of a layer and calls `Visitor.visit`, which is
   `LayerUpdate.update_layer`. That calls for each weight `StackUpdate.update` (optimizer and rounding:
   `ParameterGroup.update`) and `StackUpdate.put`.
5. Other parameters outside of layers (`update_unstacked`), then embedding and output matrices, slice by slice
   (`VocabUpdate`).
"""

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict

from jaxmem import optim
from jaxmem.optim.apply import Writer, sum_of_squares
from jaxmem.optim.groups import ParameterGroup, constrain_tree
from jaxmem.quant.precision import Params
from jaxmem.sharding.table import is_axes
from jaxmem.sharding.trees import Path, merge, nest, select, single_weights, without
from jaxmem.stack.reverse import Visitor, merge_micro_batches
from jaxmem.step import nonfinite
from jaxmem.step.by_parts import ForwardByParts, MatrixGradient, PassedStack, forward_by_parts
from jaxmem.step.objective import Batch, Sums
from jaxmem.step.state import StateSpec, TrainState
from jaxmem.step.update_by_layer import LayerUpdate, StackUpdate, Updated, add_squares
from jaxmem.step.update_vocab import VocabUpdate
from jaxmem.typing import Tree


def update_during_backward(
    spec: StateSpec, state: TrainState, batch: Batch, keys: jax.Array, write: Writer
) -> tuple[Params, Tree, Sums, jax.Array]:
    """One update.

    Args:
        spec: the specification of the step.
        state: the state before the update.
        batch: arrays [micro-batches, rows, ...].
        keys: the random key of each row, [micro-batches, rows].
        write: adds updates to weights.

    Returns:
        New parameters, new optimizer state, the sums of the objective, and the squared norms of the gradients in the
        order of `nonfinite.gradient_names`.
    """
    micro_batches = len(keys)
    opt_state = state.opt_state
    if micro_batches == 1:
        batch, key = jax.tree.map(lambda x: x[0], (batch, keys))
    else:
        batch, key = merge_micro_batches((batch, keys), micro_batches)
    network = forward_by_parts(spec, state.params, batch, key, micro_batches)
    # The groups of each stack, one per weight.
    groups = {stack.path: [spec.group(w) for w in single_weights(stack.trainable)] for stack in network.stacks}

    def vocab_update(path: Path) -> VocabUpdate:
        weight = select(state.params, nest(path, 0))
        group = spec.group(weight)
        chunk = spec.cfg.memory.loss_chunk
        entries = None if chunk == "auto" else chunk
        return VocabUpdate(group, weight, group.state(opt_state), spec.gradient_dtype, entries)

    norm = _gradient_norm(network, groups, vocab_update) if spec.cfg.needs_global_norm_first else None

    def update_stack(stack: PassedStack, g: Tree) -> tuple[Updated, Tree]:
        """Backward through a stack, updating its layers. Maps the output gradient to the input gradient."""
        layers = stack.result.call.layers
        update = LayerUpdate(
            [StackUpdate(group, group.state(opt_state), write, norm, layers) for group in groups[stack.path]]
        )

        def weights(carry: Updated) -> Tree:
            return stack.weights(carry.weights)

        def visit(carry: Updated, layer: jax.Array, dw: Tree, fetched_states: list[Tree] | None) -> Updated:
            return update.update_layer(carry, layer, nest(stack.path, dw), fetched_states)

        visitor = Visitor(update.initial_carry(stack.trainable, layers), weights, visit)
        if spec.offloads("optimizer"):  # the state of a layer is copied while its gradient is computed
            visitor = replace(visitor, fetch=update.fetch)
        return stack.result.backward(g, visitor)

    def update_unstacked(grads: Tree) -> Updated:
        """Updates parameters outside of stacks together."""
        if not jax.tree.leaves(grads):
            return Updated({}, [], {})
        weights = select(state.params, grads)
        group = spec.group(weights)
        grads = constrain_tree(grads, group.axes, "gradients")
        new, new_state = group.update(grads, group.state(opt_state), weights, write, norm=norm)
        return Updated(new, [new_state], jax.tree.map(sum_of_squares, grads))

    def update_matrix(path: Path, gradient: MatrixGradient) -> Updated:
        new, new_state, square = vocab_update(path).update(gradient, write, norm)
        return Updated(new, [new_state], nest(path, square))

    grads, g = network.loss_gradients()
    last = update_unstacked(select(grads, network.last_parameters))
    _, g = jax.lax.optimization_barrier((last.weights, g))
    gradients = network.backward(grads, g, update_stack)
    others = update_unstacked(without(gradients.of_others, flatten_dict(network.last_parameters)))
    matrices = [update_matrix(path, gradient) for path, gradient in gradients.of_matrices.items()]
    updates = [last, *gradients.of_stacks, others, *matrices]

    axes = spec.model.select(spec.model.axes)
    zeros = jax.tree.map(lambda _: 0, axes, is_leaf=is_axes)
    squares = nonfinite.in_backward_order(merge(zeros, *(update.squares for update in updates)), axes)
    new_states = merge(opt_state, *(group_state for update in updates for group_state in update.states))
    new_params = merge(state.params, *(update.weights for update in updates))
    return new_params, optim.record_norm(new_states, jnp.sqrt(jnp.sum(squares))), network.sums, squares


def _gradient_norm(
    network: ForwardByParts, groups: dict[Path, list[ParameterGroup]], vocab_update: Callable[[Path], VocabUpdate]
) -> jax.Array:
    """The norm of all gradients, computed in a backward pass that discards them."""

    def stack_backward(stack: PassedStack, g: Tree) -> tuple[jax.Array, Tree]:
        def visit(squares: jax.Array, _: jax.Array, dw: Tree, __: None) -> jax.Array:
            return add_squares(squares, groups[stack.path], nest(stack.path, dw))

        zero = jnp.zeros((), jnp.float32)
        return stack.result.backward(g, Visitor(zero, lambda _: stack.result.call.weights, visit))

    gradients = network.backward(*network.loss_gradients(), stack_backward)
    of_matrices = [vocab_update(path).squares(gradient) for path, gradient in gradients.of_matrices.items()]
    return jnp.sqrt(sum_of_squares(gradients.of_others) + sum(gradients.of_stacks) + sum(of_matrices))
