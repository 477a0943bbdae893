"""A stack of layers over the mesh axis `stage`: micro-batches pass through the stages one after the other.

`run` executes a schedule (`timetable.py`): a loop over ticks inside of a `jax.shard_map` over the stages, in
which each stage takes the branch of its operation, and then sends activations to the next stage and their gradients to
the previous one by a collective-permute. The other mesh axes are automatic: a stage's layers communicate over them as
without a pipeline. They may do so inside a branch, since all devices of a stage take the same branch.

Nothing is differentiated through the loop: `stage_layers.py` has the forward and the backward pass of a work item.

All stages compute the embedding and the loss of a micro-batch together, each in its part of the vocabulary (Yeung et
al., arXiv:2411.05288): the output of the last stage is sent to all stages, which compute the loss and its gradient
right after the forward pass. So the loss takes 1 / p of the time, and a stage stores 1 / p of the embedding and output
matrices, with their gradients and optimizer state.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem.kernels.scopes import run_count
from jaxmem.pipeline.stage_layers import Gradients, LayersOfStage, Row, StageLayers, add, run_if
from jaxmem.pipeline.timetable import BACKWARD, FORWARD, Timetable
from jaxmem.sharding.arrays import all_reduce
from jaxmem.sharding.host import put_layer, take_layer
from jaxmem.stack.call import StackCall
from jaxmem.typing import Tree

AXIS = "stage"


@dataclass(frozen=True)
class PipelineNetwork:
    """A network around its stack of layers. `outside` are the trainable weights that are not in the stack."""

    # Both are computed by all stages. (outside, micro-batch) -> the stack, with its input
    embed: Callable[[Tree, Tree], StackCall]
    loss: Callable[[Tree, Tree, Tree], tuple[jax.Array, Tree]]  # (outside, output, micro-batch) -> (loss, sums)
    outside: Tree
    batch: Tree  # leaves are [micro-batches, ...]


class Results(NamedTuple):
    """What the loop returns for one stage, of all its micro-batches."""

    layers: Gradients  # gradients of the layers of the stage
    outside: Tree  # the float32 gradients of the weights outside of the stack, which all stages compute
    sums: Tree


class _State(NamedTuple):
    """The carry of the loop: rings of slots, results, and what is sent after the tick."""

    saved: Tree  # `StageLayers.empty_ring`
    inputs: Tree
    gradients: Tree
    layers: Gradients
    outside: Tree
    sums: Tree
    forward: Tree  # sent to the next stage; until the operation runs, the first stage has the embedding here
    backward: Tree  # sent to the previous stage


def run(table: Timetable, network: PipelineNetwork, layers: LayersOfStage) -> Results:
    """Executes the table, inside of a `jax.shard_map` over the stages. Without backward passes, the gradients are
    zeros."""
    return _Run(table, network, layers)()


class _Run:
    def __init__(self, table: Timetable, network: PipelineNetwork, layers: LayersOfStage) -> None:
        self._table = table
        self._network = network
        self._p = layers.pipeline
        self._stage = jax.lax.axis_index(AXIS)
        call = self._call(jnp.int32(0))
        self._layers = StageLayers(table, layers, self._stage, call)
        self._x = jax.tree.map(jnp.zeros_like, call.x)
        # How often the planner counts the embedding and the loss: once per micro-batch.
        self._per_item = run_count(table.micro_batches, table.ticks)

    def __call__(self) -> Results:
        table = self._table
        columns = {"kind": table.kind, "micro": table.micro, "round_index": table.round_index, **vars(table.slots)}
        del columns["counts"]
        # Equal on all stages, which compute these together: whether any stage receives something, and the micro-batches
        # whose embedding, loss or gradient of the embedding is computed.
        every: dict[str, Tree] = {
            "received": np.any(table.slots.received >= 0, axis=1),
            "received_gradients": np.any(table.slots.received_gradients >= 0, axis=1),
            "embedded": table.micro_batch_of(0, FORWARD, 0),
            "loss": table.micro_batch_of(table.stages - 1, FORWARD, table.rounds - 1),
            "gradient": table.micro_batch_of(0, BACKWARD, 0),
        }
        of_stage = {name: jnp.asarray(x)[:, self._stage] for name, x in columns.items()}
        state, _ = jax.lax.scan(self._tick, self._begin(), (of_stage, every))
        return Results(state.layers, state.outside, state.sums)

    def _tick(self, state: _State, row: tuple[Row, Row]) -> tuple[_State, None]:
        of_stage, every = row
        # Branches receive only what they change, because XLA may copy what they receive (e.g. all weights of a stage).
        embed = lambda _: self._call(every["embedded"]).x  # noqa: E731
        state = state._replace(forward=run_if(every["embedded"] >= 0, embed, state.forward, self._per_item))
        operations = {FORWARD: self._forward, BACKWARD: self._backward}
        for kind, operation in operations.items():
            if scope := self._table.scope(kind, self._p.recomputes):
                state = run_if(of_stage["kind"] == kind, partial(operation, of_stage), state, scope)
        loss = partial(self._loss, every["loss"], of_stage["gradients"], state.forward)
        carry = state.gradients, state.outside, state.sums
        gradients, outside, sums = run_if(every["loss"] >= 0, loss, carry, self._per_item)
        if self._table.has_backward:
            embedding_gradient = partial(self._embedding_gradient, every["gradient"], state.backward)
            outside = run_if(every["gradient"] >= 0, embedding_gradient, outside, self._per_item)
        inputs = self._receive("received", 1, row, state.forward, state.inputs)
        gradients = self._receive("received_gradients", -1, row, state.backward, gradients)
        return state._replace(inputs=inputs, gradients=gradients, outside=outside, sums=sums), None

    def _receive(self, name: str, by: int, row: tuple[Row, Row], sent: Tree, ring: Tree) -> Tree:
        """Stores what the neighbour sent, in ticks in which any stage receives something."""
        of_stage, every = row
        slot = of_stage[name]
        p = self._p.stages
        ticks = int(np.sum(np.any(getattr(self._table.slots, name) >= 0, axis=1)))
        pairs = [(s, (s + by) % p) for s in range(p) if self._p.rounds > 1 or 0 <= s + by < p]

        def receive(ring: Tree) -> Tree:
            arrived = jax.tree.map(lambda x: jax.lax.ppermute(x, AXIS, pairs), sent)
            return _put_if(slot >= 0, ring, slot, arrived)

        return run_if(every[name], receive, ring, run_count(ticks, self._table.ticks)) if p > 1 else ring

    # ------------------------------------------------------------------ what all stages compute together

    def _loss(
        self, micro: jax.Array, slot: jax.Array, y: Tree, carry: tuple[Tree, Tree, Tree]
    ) -> tuple[Tree, Tree, Tree]:
        """Adds the loss of a micro-batch whose forward pass the last stage has finished, and its gradients. `y`: the
        output of the layers, on the last stage. On this stage, `slot` of the ring receives the gradient of `y`."""
        network = self._network
        item = self._micro(micro)
        last = self._p.stages - 1
        ring, outside, sums = carry
        y = self._from_stage(last, y)
        if not self._table.has_backward:
            return ring, outside, add(sums, network.loss(network.outside, y, item)[1])
        loss = lambda proxies, y: network.loss(proxies, y, item)  # noqa: E731
        value, back, sums_of_item = jax.vjp(loss, network.outside, y, has_aux=True)
        dw, dy = back(jnp.ones_like(value))
        return _put_if(self._stage == last, ring, slot, dy), add(outside, dw), add(sums, sums_of_item)

    def _embedding_gradient(self, micro: jax.Array, g: Tree, outside: Tree) -> Tree:
        g = self._from_stage(0, g)
        (dw,) = jax.vjp(lambda proxies: self._network.embed(proxies, self._micro(micro)).x, self._network.outside)[1](g)
        return add(outside, dw)

    def _from_stage(self, stage: int, x: Tree) -> Tree:
        """The arrays of one stage, on all stages."""
        return jax.tree.map(lambda x: all_reduce(jnp.where(self._stage == stage, x, jnp.zeros_like(x)), AXIS), x)

    # ------------------------------------------------------------------ what each stage computes

    def _forward(self, row: Row, state: _State) -> _State:
        is_first = (self._stage == 0) & (row["round_index"] == 0)
        received = take_layer(state.inputs, jnp.maximum(row["inputs"], 0))
        x = jax.tree.map(lambda x, y: jnp.where(is_first, x, y), state.forward, received)
        call = self._layers.prepare(self._call(row["micro"]))
        y, saved = self._layers.forward(call, x, row, state.saved, state.layers)
        return state._replace(saved=saved, forward=y)

    def _backward(self, row: Row, state: _State) -> _State:
        call = self._layers.prepare(self._call(row["micro"]))
        g = take_layer(state.gradients, row["gradients"])
        g, saved, of_layers = self._layers.backward(call, g, row, state.saved, state.layers)
        return state._replace(saved=saved, layers=of_layers, backward=g)

    # ------------------------------------------------------------------ the first carry

    def _begin(self) -> _State:
        network = self._network
        x = self._x
        _, of_inputs, of_gradients = self._table.slots.counts

        def ring(count: int) -> Tree:
            return jax.tree.map(lambda x: jnp.broadcast_to(jnp.zeros_like(x), (count, *x.shape)), x)

        loss = jax.eval_shape(lambda: network.loss(network.outside, x, self._micro(jnp.int32(0)))[1])
        wide = partial(jax.tree.map, lambda x: jnp.zeros(x.shape, jnp.float32))
        trains = self._table.has_backward
        outside, gradients, g = (wide(network.outside), ring(of_gradients), x) if trains else ((), (), ())
        layers = self._layers
        return _State(
            layers.empty_ring(), ring(of_inputs), gradients, layers.zero_gradients(), outside, wide(loss), x, g
        )

    def _call(self, micro: jax.Array) -> StackCall:
        return self._network.embed(self._network.outside, self._micro(micro))

    def _micro(self, micro: jax.Array) -> Tree:
        return take_layer(self._network.batch, micro)


def _put_if(condition: jax.Array, ring: Tree, slot: jax.Array, new: Tree) -> Tree:
    """The ring, with one slot replaced where the condition is true."""
    slot = jnp.maximum(slot, 0)
    old = take_layer(ring, slot)
    return put_layer(ring, slot, jax.tree.map(lambda new, old: jnp.where(condition, new, old), new, old))
