"""A stack of layers over the mesh axis `stage`: micro-batches pass through the stages one after the other.

`timetable.py` has the schedules. `run` executes one: a loop over ticks inside of a `jax.shard_map` over the stages, in
which each stage takes the branch of its operation, and then sends activations to the next stage and their gradients to
the previous one by a collective-permute. The other mesh axes are automatic: a stage's layers communicate over them as
without pipeline, inside of the branch, which all devices of a stage take.

Nothing is differentiated through the loop. The forward pass of a work item writes what `memory.remat` saves into a ring
of slots, one item per slot; the backward pass reads it, adds the gradients of each layer in place to float32 sums, and
returns the gradient of the item's input. The first stage computes the embedding of a micro-batch, and the last one its
loss and the gradient of it, right after its forward pass.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem.sharding.host import device_leaves, fetch_layer, fill, put_layer, take_layer, zeros_on_host
from jaxmem.stack.apply import StackOptions, checkpointed
from jaxmem.stack.cuts import StackCall
from jaxmem.stack.reverse import LayerDerivative
from jaxmem.stack.split_backward import SplitBackward
from jaxmem.stack.stages import Pipeline
from jaxmem.stack.timetable import BACKWARD, FORWARD, WEIGHTS, Timetable

AXIS = "stage"
Tree = Any


@dataclass(frozen=True)
class PipelineNetwork:
    """A network around its stack of layers. `outside` are the trainable weights that are not in the stack."""

    embed: Callable[[Tree, Any], StackCall]  # (outside, micro-batch) -> the stack, with its input
    loss: Callable[[Tree, Any, Any], tuple[jax.Array, Any]]  # (outside, output, micro-batch) -> (loss, sums)
    outside: Tree
    batch: Any  # leaves are [micro-batches, ...]


@dataclass(frozen=True)
class Layers:
    """The layers of one stage, [group x rounds, ...]. `at` returns the arrays to differentiate a layer with respect to,
    from its weights."""

    pipeline: Pipeline
    weights: Tree
    at: Callable[[Tree], Tree]
    options: StackOptions


class Results(NamedTuple):
    """What the loop returns for one stage; the first two are sums over its micro-batches."""

    layers: Tree  # the float32 gradients of its layers, like its weights
    outside: Tree  # the float32 gradients of the weights outside of the stack
    sums: Tree


class _State(NamedTuple):
    """The carry of the loop: rings of slots, sums, and the results that are sent after the tick."""

    saved: Tree
    waiting: Tree
    inputs: Tree
    gradients: Tree
    results: Results
    forward: Tree
    backward: Tree


def run(table: Timetable, network: PipelineNetwork, layers: Layers) -> Results:
    """Executes the table, inside of a `jax.shard_map` over the stages. Without backward passes, the gradients are
    zeros."""
    return _Run(table, network, layers)()


class _Run:
    def __init__(self, table: Timetable, network: PipelineNetwork, layers: Layers) -> None:
        self._table, self._network, self._layers = table, network, layers
        self._p = layers.pipeline
        self._stage = jax.lax.axis_index(AXIS)
        item = self._micro(jnp.int32(0))
        call = network.embed(network.outside, item)
        self._call = self._prepared(call)
        self._derivative = LayerDerivative(self._call.run, layers.at)
        self._split = SplitBackward() if table.splits_backward else None
        self._x = jax.tree.map(jnp.zeros_like, call.x)
        # How often the planner counts the embedding and the loss: once per micro-batch.
        self._per_item = f"runs_1_in_{table.rounds}"

    def __call__(self) -> Results:
        table = self._table
        columns = {"kind": table.kind, "micro": table.micro, "turn": table.turn, **vars(table.slots)}
        del columns["counts"]
        # Whether any stage receives something: all devices take the same branch.
        sends = {name: np.any(columns[name] >= 0, axis=1) for name in ("received", "returned")}
        own = {name: jnp.asarray(x)[:, self._stage] for name, x in columns.items()}
        state, _ = jax.lax.scan(self._tick, self._begin(), (own, sends))
        return state.results

    def _tick(self, state: _State, row: Any) -> tuple[_State, None]:
        own, _ = row
        operations = {FORWARD: self._forward, BACKWARD: self._backward, WEIGHTS: self._weight_gradients}
        for kind, operation in operations.items():
            if scope := self._table.scope(kind):
                state = _when(own["kind"] == kind, partial(operation, own), state, scope)
        inputs = self._receive("received", 1, row, state.forward, state.inputs)
        gradients = self._receive("returned", -1, row, state.backward, state.gradients)
        return state._replace(inputs=inputs, gradients=gradients), None

    def _receive(self, name: str, by: int, row: Any, sent: Tree, ring: Tree) -> Tree:
        """Stores what the neighbour sent, in ticks in which any stage receives something."""
        p, slot, sends = self._p.stages, row[0][name], row[1][name]
        ticks = int(np.sum(np.any(getattr(self._table.slots, name) >= 0, axis=1)))
        pairs = [(s, (s + by) % p) for s in range(p) if self._p.rounds > 1 or 0 <= s + by < p]

        def receive(ring: Tree) -> Tree:
            arrived = jax.tree.map(lambda x: jax.lax.ppermute(x, AXIS, pairs), sent)
            old = take_layer(ring, jnp.maximum(slot, 0))
            new = jax.tree.map(lambda x, old: jnp.where(slot >= 0, x, old), arrived, old)
            return put_layer(ring, jnp.maximum(slot, 0), new)

        return _when(sends, receive, ring, f"runs_{ticks}_in_{self._table.ticks}") if p > 1 else ring

    def _forward(self, row: Any, state: _State) -> _State:
        item, turn = self._micro(row["micro"]), row["turn"]
        network, outside = self._network, self._network.outside
        is_first = (self._stage == 0) & (turn == 0)
        is_last = (self._stage == self._p.stages - 1) & (turn == self._p.rounds - 1)
        call = self._prepared(network.embed(outside, item))
        slot = jnp.maximum(row["inputs"], 0)
        embed = lambda _: network.embed(outside, item).x  # noqa: E731
        x = _when(is_first, embed, take_layer(state.inputs, slot), self._per_item)
        y, saved = self._forward_layers(call, x, turn, row["saved"], state.saved)

        def loss(carry: tuple[Tree, Results]) -> tuple[Tree, Results]:
            gradients, results = carry
            if not self._table.trains:
                sums = network.loss(outside, y, item)[1]
                return gradients, results._replace(sums=_add(results.sums, sums))
            value, back, sums = jax.vjp(lambda at, y: network.loss(at, y, item), outside, y, has_aux=True)
            dw, dy = back(jnp.ones_like(value))
            gradients = put_layer(gradients, row["gradients"], dy)
            return gradients, results._replace(outside=_add(results.outside, dw), sums=_add(results.sums, sums))

        gradients, results = _when(is_last, loss, (state.gradients, state.results), self._per_item)
        return state._replace(saved=saved, gradients=gradients, results=results, forward=y)

    def _backward(self, row: Any, state: _State) -> _State:
        item, turn = self._micro(row["micro"]), row["turn"]
        network, outside = self._network, self._network.outside
        call = self._prepared(network.embed(outside, item))
        g = take_layer(state.gradients, row["gradients"])
        g, state = self._backward_layers(call, g, row, state)

        def embed(sums: Tree) -> Tree:
            (dw,) = jax.vjp(lambda at: network.embed(at, item).x, outside)[1](g)
            return _add(sums, dw)

        is_first = (self._stage == 0) & (turn == 0)
        of_outside = _when(is_first, embed, state.results.outside, self._per_item)
        return state._replace(results=state.results._replace(outside=of_outside), backward=g)

    def _weight_gradients(self, row: Any, state: _State) -> _State:
        """W: adds the weight gradients of an item, from the values that its backward pass stored."""
        turn, slot, split, group = row["turn"], row["waiting"], self._split, self._p.group
        assert split is not None
        call = self._prepared(self._network.embed(self._network.outside, self._micro(row["micro"])))

        def step(place: jax.Array, sums: Tree) -> Tree:
            known = self._known(call, place, turn, self._fetch(place, turn))
            dw = split.finish(take_layer(state.waiting, slot * group + place), known)
            return _add_at(sums, self._place(place, turn), dw)

        layers = jax.lax.fori_loop(0, self._p.group, step, state.results.layers)
        return state._replace(results=state.results._replace(layers=layers))

    def _known(self, call: StackCall, place: jax.Array, turn: jax.Array, fetched: Tree) -> tuple[Tree, Tree, Any, Any]:
        """The arrays of a layer that are not saved: to differentiate with respect to, weights, inputs."""
        weights = self._weights(place, turn, fetched)
        return self._layers.at(weights), weights, self._input(call, place, turn), call.shared

    # ------------------------------------------------------------------ the layers of a work item

    def _prepared(self, call: StackCall) -> StackCall:
        """The stack as one with this stage's number of layers, whose inputs begin with the number of the layer."""
        pipeline, run = self._p, call.run

        def layer(weights: Tree, x: Any, one: Any, shared: Any) -> tuple[Any, None]:
            number, one = one
            y, _ = run(weights, x, one, shared)
            if pipeline.stored > pipeline.layers:  # identity layers
                y = jax.tree.map(lambda y, x: jnp.where(number < pipeline.layers, y, x), y, x)
            return y, None

        return checkpointed(
            replace(call, run=layer, weights=self._layers.weights), self._layers.options, pipeline.group
        )

    def _place(self, place: jax.Array, turn: jax.Array) -> jax.Array:
        """The index of a layer among the weights of the stage."""
        return place * self._p.rounds + turn

    def _input(self, call: StackCall, place: jax.Array, turn: jax.Array) -> Any:
        number = (turn * self._p.stages + self._stage) * self._p.group + place
        return number, take_layer(call.inputs, jnp.minimum(number, self._p.layers - 1))

    def _weights(self, place: jax.Array, turn: jax.Array, fetched: Tree) -> Tree:
        return fill(take_layer(device_leaves(self._layers.weights), self._place(place, turn)), fetched)

    def _fetch(self, place: jax.Array, turn: jax.Array) -> Tree:
        """The weights of a layer that are in host memory."""
        return fetch_layer(self._layers.weights, self._place(place, turn))

    def _forward_layers(
        self, call: StackCall, x: Any, turn: jax.Array, slot: jax.Array, ring: Tree
    ) -> tuple[Any, Tree]:
        """The output of the layers, and the ring with what they save."""
        plan, trains, group = call.plan, self._table.trains, self._p.group

        def step(place: jax.Array, carry: tuple[Any, Tree, Tree]) -> tuple[Any, Tree, Tree]:
            x, ring, fetched = carry
            weights, one = self._weights(place, turn, fetched), self._input(call, place, turn)
            following = self._fetch(place + 1, turn)
            if not trains:
                return call.run(weights, x, one, call.shared)[0], ring, following
            if plan is None:
                x, saved = self._derivative.forward(weights, x, one, call.shared)
                return x, put_layer(ring, slot * group + place, call.save(saved)), following
            ring = put_layer(ring, slot * plan.slots + jnp.asarray(plan.first, jnp.int32)[place], call.save(x))
            return call.run(weights, x, one, call.shared)[0], ring, following

        begin = x, ring, self._fetch(jnp.int32(0), turn)
        x, ring, _ = jax.lax.fori_loop(0, self._p.group, step, begin)
        return x, ring

    def _backward_layers(self, call: StackCall, g: Any, row: Any, state: _State) -> tuple[Any, _State]:
        """The gradient of the input of the layers, and the state with the gradients of their weights, or with the
        values for W."""
        plan, group, split = call.plan, self._p.group, self._split
        turn, slot, last = row["turn"], row["saved"], group - 1

        def step(i: jax.Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
            g, ring, waiting, sums, fetched = carry
            place = last - i
            known = self._known(call, place, turn, fetched)
            following = self._fetch(place - 1, turn)
            if plan is None:
                saved = call.load(take_layer(ring, slot * group + place))
                derivative = self._derivative.from_saved(*known, saved)
            else:
                ring = self._recompute(call, place, turn, slot, ring)
                x = call.load(take_layer(ring, slot * plan.slots + jnp.asarray(plan.at, jnp.int32)[place]))
                derivative = self._derivative.recomputed(*known, x)
            if split is not None:
                g, stored = split.begin(derivative, g, known)
                return g, ring, put_layer(waiting, row["waiting"] * group + place, stored), sums, following
            dw, g = derivative(g)
            return g, ring, waiting, _add_at(sums, self._place(place, turn), dw), following

        begin = g, state.saved, state.waiting, state.results.layers, self._fetch(jnp.int32(last), turn)
        g, saved, waiting, sums, _ = jax.lax.fori_loop(0, self._p.group, step, begin)
        return g, state._replace(saved=saved, waiting=waiting, results=state.results._replace(layers=sums))

    def _recompute(self, call: StackCall, place: jax.Array, turn: jax.Array, slot: jax.Array, ring: Tree) -> Tree:
        """The ring, after the recomputation that the plan has before the backward pass of a layer."""
        plan = call.plan
        assert plan is not None
        if not plan.again:
            return ring
        steps = jnp.asarray(plan.again, jnp.int32).reshape(-1, 3)
        begin, end = (jnp.asarray(x, jnp.int32)[place] for x in (plan.begin, plan.end))

        def again(i: jax.Array, ring: Tree) -> Tree:
            layer, source, target = steps[i]
            weights = self._weights(layer, turn, self._fetch(layer, turn))
            x = call.load(take_layer(ring, slot * plan.slots + source))
            y, _ = call.run(weights, x, self._input(call, layer, turn), call.shared)
            return put_layer(ring, slot * plan.slots + target, call.save(y))

        with jax.named_scope(f"runs_{plan.runs}_in_{len(plan.at)}"):
            return jax.lax.fori_loop(begin, end, again, ring)

    # ------------------------------------------------------------------ the first carry

    def _begin(self) -> _State:
        table, x, network = self._table, self._x, self._network
        of_items, of_inputs, of_gradients, of_waiting = table.slots.counts
        zero = jnp.int32(0)

        def saved() -> Any:
            """What a layer saves."""
            weights, one = self._weights(zero, zero, self._fetch(zero, zero)), self._input(self._call, zero, zero)
            return self._derivative.forward(weights, x, one, self._call.shared)[1]

        def ring(count: int) -> Tree:
            return jax.tree.map(lambda x: jnp.broadcast_to(jnp.zeros_like(x), (count, *x.shape)), x)

        plan, group = self._call.plan, self._p.group
        empty = zeros_on_host if self._call.on_host else jnp.zeros
        if not table.trains:
            stored: Any = ()
        elif plan is not None:
            slots = of_items * plan.slots
            at_home = lambda x: jnp.broadcast_to(x, (slots, *x.shape))  # noqa: E731
            stored = jax.tree.map(lambda x: empty((slots, *x.shape), x.dtype) if self._call.on_host else at_home(x), x)
        else:
            stored = [empty((of_items * group, *each.shape), each.dtype) for each in jax.eval_shape(saved)]
        waiting: Any = ()
        if self._split is not None:
            each = jax.eval_shape(self._saved_for_weights)
            waiting = [jnp.zeros((of_waiting * group, *x.shape), x.dtype) for x in each]
        loss = jax.eval_shape(lambda: network.loss(network.outside, x, self._micro(zero))[1])
        wide = partial(jax.tree.map, lambda x: jnp.zeros(x.shape, jnp.float32))
        at = self._layers.at(self._layers.weights) if table.trains else ()
        results = Results(wide(at), wide(network.outside) if table.trains else (), wide(loss))
        returned = ring(of_gradients) if table.trains else ()
        return _State(stored, waiting, ring(of_inputs), returned, results, x, x if table.trains else ())

    def _saved_for_weights(self) -> list[jax.Array]:
        """The values that the backward pass of a layer saves for W."""
        zero, split = jnp.int32(0), self._split
        assert split is not None
        known = self._known(self._call, zero, zero, self._fetch(zero, zero))
        if self._call.plan is None:
            saved = self._derivative.forward(known[1], self._x, *known[2:])[1]
            derivative = self._derivative.from_saved(*known, saved)
        else:
            derivative = self._derivative.recomputed(*known, self._x)
        return split.begin(derivative, self._x, known)[1]

    def _micro(self, micro: jax.Array) -> Any:
        return take_layer(self._network.batch, micro)


def _when(condition: jax.Array, function: Callable[[Tree], Tree], state: Tree, scope: str) -> Tree:
    """`function(state)` where the condition is true, otherwise `state`. A loop of at most one iteration updates the
    state in place; XLA copies what the branches of a conditional pass on. `scope` tells the planner how often it
    runs."""
    with jax.named_scope(scope):
        return jax.lax.fori_loop(0, condition.astype(jnp.int32), lambda _, state: function(state), state)


def _add(total: Tree, new: Tree) -> Tree:
    return jax.tree.map(lambda total, x: total + x.astype(total.dtype), total, new)


def _add_at(total: Tree, layer: jax.Array, new: Tree) -> Tree:
    """Adds the gradients of a layer, in place."""
    return jax.tree.map(
        lambda total, x: jax.lax.dynamic_update_index_in_dim(
            total, jax.lax.dynamic_index_in_dim(total, layer, keepdims=False) + x.astype(total.dtype), layer, 0
        ),
        total,
        new,
    )


def apply_in_order(pipeline: Pipeline, call: StackCall) -> tuple[Any, Any]:
    """Applies one layer after the other on all devices, for a batch without micro-batches. The weights of one layer at
    a time are sent from their stage to all devices."""
    staged = jax.tree.map(pipeline.split, call.weights)

    def fetch(stacked: jax.Array, layer: jax.Array) -> jax.Array:
        group, place = layer // pipeline.group, layer % pipeline.group
        turn, stage = group // pipeline.stages, group % pipeline.stages
        one = jax.lax.dynamic_index_in_dim(stacked, place, axis=1, keepdims=False)
        one = jax.lax.dynamic_index_in_dim(one, turn, axis=1, keepdims=False)
        mine = (jnp.arange(pipeline.stages) == stage).reshape(-1, *[1] * (one.ndim - 1))
        return jnp.sum(jnp.where(mine, one, jnp.zeros_like(one)), axis=0, dtype=one.dtype)

    def step(x: Any, xs: tuple[jax.Array, Any]) -> tuple[Any, Any]:
        layer, one = xs
        return call.run(jax.tree.map(partial(fetch, layer=layer), staged), x, one, call.shared)

    return jax.lax.scan(step, call.x, (jnp.arange(pipeline.layers, dtype=jnp.int32), call.inputs))
