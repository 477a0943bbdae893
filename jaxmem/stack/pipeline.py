"""A stack of layers over the mesh axis `stage`: micro-batches pass through the stages one after the other.

`run` executes a schedule (`pipeline_schedules.py`): a loop over ticks inside of a `jax.shard_map` over the stages, in
which each stage takes the branch of its operation, and then sends activations to the next stage and their gradients to
the previous one by a collective-permute. The other mesh axes are automatic: a stage's layers communicate over them as
without pipeline, inside of the branch, which all devices of a stage take.

Nothing is differentiated through the loop: `stage_layers.py` has the forward and the backward pass of a work item. The
first stage computes the embedding of a micro-batch, and the last one its loss and the gradient of it, right after its
forward pass.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem.sharding.host import put_layer, take_layer
from jaxmem.stack.cuts import StackCall
from jaxmem.stack.stage_layers import Gradients, Layers, StageLayers, when
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


class Results(NamedTuple):
    """What the loop returns for one stage, of all its micro-batches."""

    layers: Gradients  # of its layers
    outside: Tree  # the float32 gradients of the weights outside of the stack
    sums: Tree


class _State(NamedTuple):
    """The carry of the loop: rings of slots, sums, and the results that are sent after the tick."""

    rings: tuple[Tree, Tree]  # `StageLayers.empty_rings`
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
        self._table, self._network = table, network
        self._p = layers.pipeline
        self._stage = jax.lax.axis_index(AXIS)
        call = network.embed(network.outside, self._micro(jnp.int32(0)))
        self._layers = StageLayers(table, layers, self._stage, call)
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
                state = when(own["kind"] == kind, partial(operation, own), state, scope)
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

        return when(sends, receive, ring, f"runs_{ticks}_in_{self._table.ticks}") if p > 1 else ring

    def _forward(self, row: Any, state: _State) -> _State:
        item, turn = self._micro(row["micro"]), row["turn"]
        network, outside = self._network, self._network.outside
        is_first = (self._stage == 0) & (turn == 0)
        is_last = (self._stage == self._p.stages - 1) & (turn == self._p.rounds - 1)
        call = self._layers.prepared(network.embed(outside, item))
        slot = jnp.maximum(row["inputs"], 0)
        embed = lambda _: network.embed(outside, item).x  # noqa: E731
        x = when(is_first, embed, take_layer(state.inputs, slot), self._per_item)
        y, saved = self._layers.forward(call, x, row, state.rings[0], state.results.layers)

        def loss(carry: tuple[Tree, Results]) -> tuple[Tree, Results]:
            gradients, results = carry
            if not self._table.trains:
                sums = network.loss(outside, y, item)[1]
                return gradients, results._replace(sums=_add(results.sums, sums))
            value, back, sums = jax.vjp(lambda at, y: network.loss(at, y, item), outside, y, has_aux=True)
            dw, dy = back(jnp.ones_like(value))
            gradients = put_layer(gradients, row["gradients"], dy)
            return gradients, results._replace(outside=_add(results.outside, dw), sums=_add(results.sums, sums))

        gradients, results = when(is_last, loss, (state.gradients, state.results), self._per_item)
        return state._replace(rings=(saved, state.rings[1]), gradients=gradients, results=results, forward=y)

    def _backward(self, row: Any, state: _State) -> _State:
        item, turn = self._micro(row["micro"]), row["turn"]
        network, outside = self._network, self._network.outside
        call = self._layers.prepared(network.embed(outside, item))
        g = take_layer(state.gradients, row["gradients"])
        g, rings, of_layers = self._layers.backward(call, g, row, state.rings, state.results.layers)

        def embed(sums: Tree) -> Tree:
            (dw,) = jax.vjp(lambda at: network.embed(at, item).x, outside)[1](g)
            return _add(sums, dw)

        is_first = (self._stage == 0) & (turn == 0)
        of_outside = when(is_first, embed, state.results.outside, self._per_item)
        results = state.results._replace(layers=of_layers, outside=of_outside)
        return state._replace(rings=rings, results=results, backward=g)

    def _weight_gradients(self, row: Any, state: _State) -> _State:
        call = self._layers.prepared(self._network.embed(self._network.outside, self._micro(row["micro"])))
        of_layers = self._layers.weight_gradients(call, row, state.rings[1], state.results.layers)
        return state._replace(results=state.results._replace(layers=of_layers))

    # ------------------------------------------------------------------ the first carry

    def _begin(self) -> _State:
        table, x, network = self._table, self._x, self._network
        _, of_inputs, of_gradients, _ = table.slots.counts

        def ring(count: int) -> Tree:
            return jax.tree.map(lambda x: jnp.broadcast_to(jnp.zeros_like(x), (count, *x.shape)), x)

        loss = jax.eval_shape(lambda: network.loss(network.outside, x, self._micro(jnp.int32(0)))[1])
        wide = partial(jax.tree.map, lambda x: jnp.zeros(x.shape, jnp.float32))
        results = Results(self._layers.no_gradients(), wide(network.outside) if table.trains else (), wide(loss))
        returned = ring(of_gradients) if table.trains else ()
        return _State(self._layers.empty_rings(), ring(of_inputs), returned, results, x, x if table.trains else ())

    def _micro(self, micro: jax.Array) -> Any:
        return take_layer(self._network.batch, micro)


def _add(total: Tree, new: Tree) -> Tree:
    return jax.tree.map(lambda total, x: total + x.astype(total.dtype), total, new)
