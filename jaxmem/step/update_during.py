"""`memory.update: during`: each layer is updated in the backward pass, as soon as its gradient is computed.

The backward pass goes through the layers from the last to the first. A layer's gradient is computed, its weights and
its part of the optimizer state are read, updated and written in place, and the gradient is freed. With P parameters in
N layers, gradients take P / N values instead of P, for any optimizer; the results are identical to updating after the
backward pass (Lv et al., arXiv:2306.09782). With micro-batches, a layer is backpropagated through all of them before
it is updated. Embedding and output matrices are updated at the end, slice by slice (`update_in_parts.py`). Parameters
after the layers (the final norm) are updated before the layers, other parameters outside of layers at the end.

An optimizer that needs the norm of all gradients before the first update (clipping by the global norm) requires an
additional backward pass to compute the norm.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import unflatten_dict

from jaxmem import optim
from jaxmem.optim.apply import sum_of_squares
from jaxmem.optim.groups import Write, constrain_tree, merge, select, single_weights, without
from jaxmem.quant.precision import Params
from jaxmem.sharding import is_axes
from jaxmem.sharding.host import fetch_from_host, send_like
from jaxmem.stack import Visitor, merge_micro_batches
from jaxmem.step import nonfinite
from jaxmem.step.objective import Batch, Sums
from jaxmem.step.segments import Path, Segments
from jaxmem.step.state import StateSpec, TrainState
from jaxmem.step.update_in_parts import LayerUpdate, VocabUpdate, add_squares

Tree = Any


def update_during_backward(
    spec: StateSpec, state: TrainState, batch: Batch, keys: jax.Array, write: Write
) -> tuple[Params, Any, Sums, jax.Array]:
    """Returns new parameters, new optimizer state, the sums of the objective, and the squared norms of the gradients in
    the order of `nonfinite.gradient_names`. Leaves of the batch, and `keys`, are [micro-batches, rows, ...]."""
    micro_batches = len(keys)
    if micro_batches == 1:
        batch, key = jax.tree.map(lambda x: x[0], (batch, keys))
    else:
        batch, key = merge_micro_batches((batch, keys), micro_batches)
    network = Segments(spec, state.params, batch, key, micro_batches)
    return _BackwardUpdate(spec, state, network, write)()


class _BackwardUpdate:
    def __init__(self, spec: StateSpec, state: TrainState, network: Segments, write: Write) -> None:
        self._spec, self._state, self._network, self._write = spec, state, network, write
        # The groups of each stack, one per weight.
        self._groups = {n: [spec.group(w) for w in single_weights(network.trainable(n))] for n in network.stacks}
        self._norm: jax.Array | None = None  # the norm of all gradients, if the optimizer needs it
        self._params: list[Tree] = []
        self._states: list[Tree] = []
        self._squares: list[Tree] = []

    def __call__(self) -> tuple[Params, Any, Sums, jax.Array]:
        network, params, opt_state = self._network, self._state.params, self._state.opt_state
        if self._spec.cfg.needs_global_norm_first:
            self._norm = self._measure()
        grads, matrices = network.backward(self._update_stack, begin=self._update_unstacked)
        self._update_unstacked(without(grads, network.last))
        for path, gradient in matrices.items():
            new, state, square = self._vocab_update(path).update(gradient, self._write, self._norm)
            self._add(new, [state], unflatten_dict({path: square}))
        axes = self._spec.model.select(self._spec.model.axes)
        zeros = jax.tree.map(lambda _: 0, axes, is_leaf=is_axes)
        squares = nonfinite.in_backward_order(merge(zeros, *self._squares), axes)
        opt_state = optim.record_norm(merge(opt_state, *self._states), jnp.sqrt(jnp.sum(squares)))
        return merge(params, *self._params), opt_state, network.sums, squares

    def _update_stack(self, number: int, g: Any) -> Any:
        """Backward through a stack, updating its layers. Maps the output gradient to the input gradient."""
        network, groups, stack = self._network, self._groups[number], self._network.stacks[number]
        before = [group.state(self._state.opt_state) for group in groups]
        update = LayerUpdate(groups, before, self._write, self._norm, stack.layers)

        def fetch(carry: Any, layer: jax.Array) -> list[Tree] | None:
            """Copies state from host memory while the gradient is computed."""
            return update.fetch(carry, layer) if self._spec.offloads("optimizer") else None

        def visit(carry: Any, layer: jax.Array, dw: Tree, fetched: list[Tree] | None) -> Any:
            return update(carry, layer, network.nest(number, dw), fetched)

        weights = lambda carry: network.weights(number, carry[0])  # noqa: E731
        visitor = Visitor(update.begin(network.trainable(number), stack.layers), weights, visit, fetch)
        done, g = stack.backward(g, visitor)
        self._add(*done)
        return g

    def _update_unstacked(self, grads: Tree) -> Tree:
        """Updates the parameters outside of stacks together."""
        if not jax.tree.leaves(grads):
            return grads
        weights = select(self._state.params, grads)
        group = self._spec.group(weights)
        grads = constrain_tree(grads, group.axes, "gradients")
        before = group.state(self._state.opt_state)
        new, state = group.update(grads, fetch_from_host(before), weights, self._write, norm=self._norm)
        self._add(new, [send_like(state, before)], jax.tree.map(sum_of_squares, grads))
        return new

    def _measure(self) -> jax.Array:
        """The norm of all gradients, computed in a backward pass that discards them."""
        network = self._network
        sums = []

        def through(number: int, g: Any) -> Any:
            stack, groups = network.stacks[number], self._groups[number]

            def visit(squares: jax.Array, _: jax.Array, dw: Tree, __: None) -> jax.Array:
                return add_squares(squares, groups, network.nest(number, dw))

            zero = jnp.zeros((), jnp.float32)
            squares, g = stack.backward(g, Visitor(zero, lambda _: stack.applied.weights, visit))
            sums.append(squares)
            return g

        grads, matrices = network.backward(through)
        sums += [self._vocab_update(path).squares(gradient) for path, gradient in matrices.items()]
        return jnp.sqrt(sum_of_squares(grads) + sum(sums))

    def _add(self, params: Tree, states: list[Tree], squares: Tree) -> None:
        self._params.append(params)
        self._states += states
        self._squares.append(squares)

    def _vocab_update(self, path: Path) -> VocabUpdate:
        weight = select(self._state.params, unflatten_dict({path: 0}))
        group, chunk = self._spec.group(weight), self._spec.cfg.memory.loss_chunk
        entries = None if chunk == "auto" else chunk
        return VocabUpdate(group, weight, group.state(self._state.opt_state), self._spec.gradient_dtype, entries)
