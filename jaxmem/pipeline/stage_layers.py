"""The layers of one pipeline stage: the forward pass and the backward pass of a work item.

The forward pass writes what `memory.remat` saves into a ring of slots, one item per slot; the backward pass reads it
and adds the gradients of each layer in place to float32 sums. After the last micro-batch a `Visitor` may update the
weights of the layer: no later operation reads them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxmem.kernels.scopes import run_count
from jaxmem.pipeline.stages import Pipeline
from jaxmem.pipeline.timetable import Timetable
from jaxmem.sharding.host import put_layer, take_layer, zeros_on_host
from jaxmem.stack.apply import checkpointed
from jaxmem.stack.call import StackCall
from jaxmem.stack.reverse import ProxiesOf, SavedDerivative, Visitor, differentiate_layer
from jaxmem.stack.scheduled import fetch_layer, layer_with, recompute
from jaxmem.typing import Tree

Row = Mapping[str, jax.Array]  # a tick of a stage: the columns of the timetable


@dataclass(frozen=True)
class LayersOfStage:
    """The layers of one stage, [group x rounds, ...]. With a visitor, the gradients of a layer are passed to it instead
    of returned."""

    pipeline: Pipeline
    weights: Tree
    proxies_of: ProxiesOf
    visitor: Visitor[Tree] | None = None


class Gradients(NamedTuple):
    """What the loop carries for the gradients of the layers of a stage."""

    sums: Tree  # the float32 sums of all layers; empty with a visitor and one micro-batch
    visitor_carry: Tree  # the carry of the visitor


class StageLayers:
    """The operations of a stage. `call`: the stack, with the input of any one micro-batch. `row`, an argument of the
    operations: a tick of the timetable."""

    def __init__(self, table: Timetable, layers: LayersOfStage, stage: jax.Array, call: StackCall) -> None:
        self._table = table
        self._layers = layers
        self._stage = stage
        self._x = jax.tree.map(jnp.zeros_like, call.x)
        self._p = layers.pipeline
        self._visitor = layers.visitor
        self._call = self.prepare(call)
        # Without a plan every layer saves its derivative.
        saves = self._call.plan is None and table.has_backward
        self._derivative = SavedDerivative.of(self._call.run, layers.proxies_of, self._example) if saves else None

    def prepare(self, call: StackCall) -> StackCall:
        """The stack with only the layers of this stage. Each layer receives its number as an additional input."""
        pipeline = self._p

        def layer(weights: Tree, x: Tree, numbered: tuple[jax.Array, Tree], shared: Tree) -> tuple[Tree, None]:
            number, layer_input = numbered
            y, _ = call.run(weights, x, layer_input, shared)
            if pipeline.stored > pipeline.layers:  # identity layers
                y = jax.tree.map(lambda y, x: jnp.where(number < pipeline.layers, y, x), y, x)
            return y, None

        return checkpointed(replace(call, run=layer, weights=self._layers.weights), pipeline.group)

    def forward(self, call: StackCall, x: Tree, row: Row, ring: Tree, gradients: Gradients) -> tuple[Tree, Tree]:
        """The forward pass of a work item.

        Args:
            call: the stack of this stage (`prepare`).
            x: the input of its first layer.
            row: a tick of the timetable.
            ring: what forward passes have saved for backward passes.
            gradients: has the current weights, if there is a visitor.

        Returns:
            The output of the layers, and the ring with what they save.
        """
        call = self._with_weights(call, gradients)
        plan = call.plan
        group = self._p.group
        round_index = row["round_index"]
        slot = row["saved"]

        def step(place: jax.Array, carry: tuple[Tree, Tree, Tree]) -> tuple[Tree, Tree, Tree]:
            x, ring, fetched = carry
            weights = self._weights(call, place, round_index, fetched)
            layer_input = self._input(call, place, round_index)
            following = self._fetch(call, place + 1, round_index)
            if not self._table.has_backward:
                return call.run(weights, x, layer_input, call.shared)[0], ring, following
            if plan is None:
                assert self._derivative is not None
                x, saved = self._derivative.forward(weights, x, layer_input, call.shared)
                return x, put_layer(ring, slot * group + place, call.save(saved)), following
            slot_of_layer = slot * plan.slots + jnp.asarray(plan.forward_slots, jnp.int32)[place]
            ring = put_layer(ring, slot_of_layer, call.save_boundary(x))
            return call.run(weights, x, layer_input, call.shared)[0], ring, following

        first = self._fetch(call, jnp.int32(0), round_index)
        x, ring, _ = jax.lax.fori_loop(0, group, step, (x, ring, first))
        return x, ring

    def backward(
        self, call: StackCall, g: Tree, row: Row, ring: Tree, gradients: Gradients
    ) -> tuple[Tree, Tree, Gradients]:
        """The backward pass of a work item. The arguments are those of `forward`, and `g`, the gradient of its output.

        Returns:
            The gradient of the input of the layers, the ring, and `gradients`, to which the weight gradients of this
            item are added.
        """
        plan = call.plan
        group = self._p.group
        round_index = row["round_index"]
        slot = row["saved"]

        def step(i: jax.Array, carry: tuple[Tree, ...]) -> tuple[Tree, ...]:
            g, ring, gradients, fetched = carry
            place = group - 1 - i
            current = self._with_weights(call, gradients)
            weights = self._weights(current, place, round_index, fetched)
            layer_input = self._input(current, place, round_index)
            following = self._fetch(current, place - 1, round_index)
            if plan is None:
                assert self._derivative is not None
                saved = call.load(take_layer(ring, slot * group + place))
                derivative = self._derivative.load(weights, layer_input, call.shared, saved)
            else:
                read = partial(self._weights_and_input, current, round_index)
                ring = recompute(current, ring, place, slot * plan.slots, read)
                slot_of_layer = slot * plan.slots + jnp.asarray(plan.backward_slots, jnp.int32)[place]
                x = call.load_boundary(take_layer(ring, slot_of_layer))
                proxies = self._layers.proxies_of(weights)
                _, derivative = differentiate_layer(current.run, proxies, weights, layer_input, call.shared, x)
            dw, g = derivative(g)
            gradients, g = self._add(gradients, place, row, dw, g)
            return g, ring, gradients, following

        last = self._fetch(self._with_weights(call, gradients), jnp.int32(group - 1), round_index)
        g, ring, gradients, _ = jax.lax.fori_loop(0, group, step, (g, ring, gradients, last))
        return g, ring, gradients

    def _with_weights(self, call: StackCall, gradients: Gradients) -> StackCall:
        """The call with the current weights of the stage."""
        visitor = self._visitor
        return call if visitor is None else replace(call, weights=visitor.weights(gradients.visitor_carry))

    def _add(self, gradients: Gradients, place: jax.Array, row: Row, dw: Tree, g: Tree) -> tuple[Gradients, Tree]:
        """Adds the gradients of a layer. With a visitor also returns `g`, the gradient of the layer's input, computed
        before the visitor writes: otherwise XLA would copy the old weights."""
        visitor = self._visitor
        sums, visitor_carry = gradients
        count = self._p.micro_batches
        layer = self._place(place, row["round_index"])
        if visitor is None or count > 1:
            sums = put_layer(sums, layer, add(take_layer(sums, layer), dw))
        if visitor is None:
            return Gradients(sums, visitor_carry), g
        layer, sums, dw, g = jax.lax.optimization_barrier((layer, sums, dw, g))

        def visit(visitor_carry: Tree) -> Tree:
            total = take_layer(sums, layer) if count > 1 else jax.tree.map(lambda x: x.astype(jnp.float32), dw)
            return visitor.visit(visitor_carry, layer, total, None)

        if count > 1:
            visitor_carry = run_if(row["micro"] == count - 1, visit, visitor_carry, run_count(1, count))
        else:
            visitor_carry = visit(visitor_carry)
        return Gradients(sums, visitor_carry), g

    # ------------------------------------------------------------------ the first carry

    def empty_ring(self) -> Tree:
        """The ring of what F saves for B."""
        if not self._table.has_backward:
            return ()
        items, *_ = self._table.slots.counts
        plan = self._call.plan
        if plan is not None:
            slots = items * plan.slots
            boundary = self._call.encode_boundary(self._x)
            if self._call.on_host:
                return jax.tree.map(lambda x: zeros_on_host((slots, *x.shape), x.dtype), boundary)
            return jax.tree.map(lambda x: jnp.broadcast_to(x, (slots, *x.shape)), boundary)
        derivative = self._derivative
        assert derivative is not None
        saved = jax.make_jaxpr(lambda: derivative.forward(*self._example())[1])().out_avals
        # A policy has sent the values that it offloads by name to the host already.
        is_away = [self._call.on_host or array.memory_space == jax.memory.Space.Host for array in saved]
        return [
            (zeros_on_host if away else jnp.zeros)((items * self._p.group, *array.shape), array.dtype)
            for array, away in zip(saved, is_away, strict=True)
        ]

    def zero_gradients(self) -> Gradients:
        """The gradients before the first backward pass."""
        visitor_carry = () if self._visitor is None else self._visitor.begin
        if not self._table.has_backward or (self._visitor is not None and self._p.micro_batches == 1):
            return Gradients((), visitor_carry)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), self._layers.proxies_of(self._layers.weights))
        return Gradients(zeros, visitor_carry)

    def _example(self) -> tuple[Tree, Tree, Tree, Tree]:
        """Arguments of a layer: weights, activations x, the input of this layer, inputs shared by all layers."""
        zero = jnp.int32(0)
        call = self._call
        weights, layer_input = self._weights_and_input(call, zero, zero)
        return weights, self._x, layer_input, call.shared

    # ------------------------------------------------------------------ one layer

    def _place(self, place: jax.Array, round_index: jax.Array) -> jax.Array:
        """The index of a layer among the weights of the stage."""
        return place * self._p.rounds + round_index

    def _input(self, call: StackCall, place: jax.Array, round_index: jax.Array) -> Tree:
        number = (round_index * self._p.stages + self._stage) * self._p.group + place
        return number, take_layer(call.inputs, jnp.minimum(number, self._p.layers - 1))

    def _weights(self, call: StackCall, place: jax.Array, round_index: jax.Array, fetched: Tree) -> Tree:
        return layer_with(call.weights, self._place(place, round_index), fetched)

    def _fetch(self, call: StackCall, place: jax.Array, round_index: jax.Array) -> Tree:
        """The weights of a layer that are in host memory."""
        return fetch_layer(call.weights, self._place(place, round_index))

    def _weights_and_input(self, call: StackCall, round_index: jax.Array, place: jax.Array) -> tuple[Tree, Tree]:
        fetched = self._fetch(call, place, round_index)
        return self._weights(call, place, round_index, fetched), self._input(call, place, round_index)


def add(total: Tree, new: Tree) -> Tree:
    """The sums, in their dtype."""
    return jax.tree.map(lambda total, x: total + x.astype(total.dtype), total, new)


def run_if(condition: jax.Array, function: Callable[[Tree], Tree], state: Tree, scope: str) -> Tree:
    """`function(state)` where the condition is true, otherwise `state`. It is a loop of at most one iteration, which
    updates the state in place; a conditional would copy what its branches return unchanged. `scope` tells the
    planner how often the function runs."""
    with jax.named_scope(scope):
        return jax.lax.fori_loop(0, condition.astype(jnp.int32), lambda _, state: function(state), state)
