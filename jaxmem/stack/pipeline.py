"""A stack of layers over the mesh axis `stage`: micro-batches follow each other through the stages.

GPipe (Huang et al., arXiv:1811.06965) as one program for all devices (Xu et al., arXiv:2105.04663): the stages'
inputs are one array, split over `stage`; a tick runs every stage on its own part at once and hands the results on,
a collective-permute. With p stages and m micro-batches m of the m + p - 1 ticks do work on a stage: the bubble is
(p - 1) / (m + p - 1). The interleaved schedule (Narayanan et al., arXiv:2104.04473) gives each stage v groups of
layers that do not follow each other, so that a micro-batch goes round v times and a tick is v times as short:
(p - 1) / (v m + p - 1).

With L layers, boundaries of B bytes and K bytes kept of a layer by `memory.remat`, each device holds
(m + (p - 1) / v) L / p K for the backward pass: layers fall by p, and all micro-batches are there at once. What goes
in and what comes out lies spread over the stages and moves by one stage a visit: m / p B, never m B. A tick sends 2 B.
Weights stay where they are. A device takes part in the ticks of the bubble and throws the result away.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem.config.recompute import is_scheduled
from jaxmem.sharding import rotate, shard_first_dim, vmap_groups
from jaxmem.stack.remat import Remat, policy

Run = Callable[[Any, Any, Any, Any], tuple[Any, Any]]  # (one layer's weights, x, its input, beside) -> (x, output)
AXIS = "stage"


@dataclass(frozen=True)
class Pipeline:
    """So many layers over so many stages. What does not divide is filled up with layers that do nothing."""

    layers: int
    stages: int
    micro_batches: int
    rounds: int = 1  # how often a micro-batch goes round; 1 is GPipe

    @property
    def group(self) -> int:
        """Layers that a stage runs in a tick."""
        return -(-self.layers // (self.stages * self.rounds))

    @property
    def stored(self) -> int:
        """Layers with those that do nothing."""
        return self.stages * self.group * self.rounds

    @property
    def slots(self) -> int:
        """Micro-batches with empty ones, as many on every stage."""
        return -(-self.micro_batches // self.stages) * self.stages

    @property
    def ticks(self) -> int:
        return self.rounds * self.micro_batches + self.stages - 1

    @property
    def bubble(self) -> float:
        """The share of ticks in which a stage has nothing to do.

        >>> Pipeline(layers=32, stages=4, micro_batches=8).bubble
        0.2727272727272727
        """
        return (self.stages - 1) / self.ticks

    def together(self, remat: Remat) -> int:
        """How many layers of a tick go back from one boundary that is kept: with `sqrt` as many as keep the fewest.

        >>> pipeline = Pipeline(layers=32, stages=4, micro_batches=2)
        >>> [pipeline.together(remat) for remat in ("full", "every_2", "sqrt")]
        [1, 2, 8]
        """
        if not isinstance(remat, str) or not is_scheduled(remat):
            return 1
        if remat != "sqrt":
            return min(int(remat.removeprefix("every_")), self.group)
        return min(range(1, self.group + 1), key=lambda size: self.ticks * -(-self.group // size) + size)

    @cached_property
    def order(self) -> np.ndarray:
        """Which layer of the model stands at each place of the stored stack, `stages` x `group` x `rounds`; places
        that the model has no layer for have numbers from `layers` on.

        >>> Pipeline(layers=8, stages=2, micro_batches=4, rounds=2).order.tolist()
        [0, 4, 1, 5, 2, 6, 3, 7]
        """
        stage, place, turn = np.ogrid[: self.stages, : self.group, : self.rounds]
        return ((turn * self.stages + stage) * self.group + place).reshape(-1)

    def arranged(self, stacked: jax.Array) -> jax.Array:
        """The model's layers, [layers, ...], as they are stored; what fills up is zeros."""
        filled = jnp.pad(stacked, [(0, self.stored - self.layers), *[(0, 0)] * (stacked.ndim - 1)])
        return filled if self.rounds == 1 else filled[self.order]

    def split(self, stacked: jax.Array) -> jax.Array:
        """[stored, ...] -> [stages, group, rounds, ...], no byte moved."""
        return stacked.reshape(self.stages, self.group, self.rounds, *stacked.shape[1:])


def in_order(pipeline: Pipeline, run: Run, weights: Any, x: Any, inputs: Any, beside: Any) -> tuple[Any, Any]:
    """Layer after layer on all devices, for what has no micro-batches: each layer's weights come from their stage to
    all, one layer at a time."""
    staged = jax.tree.map(pipeline.split, weights)

    def fetch(stacked: jax.Array, layer: jax.Array) -> jax.Array:
        group, place = layer // pipeline.group, layer % pipeline.group
        turn, stage = group // pipeline.stages, group % pipeline.stages
        one = jax.lax.dynamic_index_in_dim(stacked, place, axis=1, keepdims=False)
        one = jax.lax.dynamic_index_in_dim(one, turn, axis=1, keepdims=False)
        mine = (jnp.arange(pipeline.stages) == stage).reshape(-1, *[1] * (one.ndim - 1))
        return jnp.sum(jnp.where(mine, one, jnp.zeros_like(one)), axis=0, dtype=one.dtype)

    def step(x: Any, xs: tuple[jax.Array, Any]) -> tuple[Any, Any]:
        layer, one = xs
        return run(jax.tree.map(partial(fetch, layer=layer), staged), x, one, beside)

    return jax.lax.scan(step, x, (jnp.arange(pipeline.layers, dtype=jnp.int32), inputs))


def through_stages(
    pipeline: Pipeline, run: Run, weights: Any, x: Any, inputs: tuple[Any, Any], beside: tuple[Any, Any], remat: Remat
) -> Any:
    """All micro-batches, stacked in `slots`, through all layers. `inputs` and `beside` come with which of their
    leaves hold one of each micro-batch."""
    p = pipeline
    shapes = {leaf.shape[1:] for leaf in jax.tree.leaves(weights)}
    seen = {
        (*group, p.stages, *rounds, *shape)
        for shape in shapes for rounds in ((), (p.rounds,)) for group in ((), vmap_groups())
    }  # fmt: skip
    places = jnp.arange(p.group, dtype=jnp.int32)
    stages = jnp.arange(p.stages, dtype=jnp.int32)

    def layer(weights: Any, x: Any, sums: Any, place: jax.Array, stage: jax.Array, item: jax.Array) -> Any:
        """Everything that depends on the tick is looked up in here, or it would be kept for each tick. And what does
        not depend on it is made to, or jax would gather the weights of all layers before the first tick."""
        weights, item = jax.lax.optimization_barrier((weights, item))
        weights, sums = _summed_into(weights, sums, place)
        micro, turn = _item(p, item)
        number = (turn * p.stages + stage) * p.group + place
        mine = _of_micro(*beside, micro)
        one = jax.tree.map(lambda leaf: leaf[jnp.minimum(number, p.layers - 1)], _of_micro(*inputs, micro))
        y, _ = run(jax.tree.map(partial(_pick, turn), weights), x, one, mine)
        if p.stored == p.layers:
            return y, sums
        return jax.tree.map(lambda y, x: jnp.where(number < p.layers, y, x), y, x), sums

    again = partial(jax.checkpoint, policy=policy(remat, seen), prevent_cse=False)
    size = p.together(remat)

    def stage(weights: Any, x: Any, sums: Any, stage: jax.Array, item: jax.Array) -> Any:
        if size == 1:
            step = lambda carry, xs: (again(layer)(xs[0], *carry, xs[1], stage, item), None)  # noqa: E731
            return jax.lax.scan(step, (x, sums), (weights, places))[0]

        @again
        def one(x: Any, sums: Any, place: jax.Array) -> tuple[Any, Any]:
            """Weights are looked up in here, for this tick: handed on in segments, or found before the first tick, they
            would be copies."""
            place, now = jax.lax.optimization_barrier((place, item))
            own = jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, place, keepdims=False), weights)
            return layer(own, x, sums, place, stage, now)

        @again
        def segment(x: Any, sums: Any, places: jax.Array) -> tuple[Any, Any]:
            return jax.lax.scan(lambda carry, place: (one(*carry, place), None), (x, sums), places)[0]

        whole = places[: p.group // size * size].reshape(-1, size)
        carry, _ = jax.lax.scan(lambda carry, places: (segment(*carry, places), None), (x, sums), whole)
        return segment(*carry, places[whole.size :]) if whole.size < p.group else carry

    staged = jax.tree.map(lambda leaf: shard_first_dim(p.split(leaf), AXIS), weights)
    sums = jax.tree.map(lambda leaf: shard_first_dim(_sum_of(leaf), AXIS), staged)
    staged = jax.lax.stop_gradient(staged)  # its gradient comes by way of the sums
    waiting = jax.tree.map(lambda leaf: shard_first_dim(leaf.reshape(p.stages, -1, *leaf.shape[1:]), AXIS), x)

    # Linear: kept would be nothing but masks as large as what they mask. A new function each time, since jax keeps what
    # it has traced of one, and the devices that it was traced for with it.
    hand_on = jax.checkpoint(partial(_hand_on, p))

    def tick(carry: tuple[Any, Any, Any], t: jax.Array) -> tuple[tuple[Any, Any, Any], None]:
        x, waiting, sums = carry
        y, sums = jax.vmap(stage, spmd_axis_name=AXIS)(staged, x, sums, stages, t - stages)
        return (*hand_on(y, waiting, t + 1), sums), None

    begin = hand_on(jax.tree.map(lambda leaf: jnp.zeros_like(leaf[:, 0]), waiting), waiting, jnp.int32(0))
    (_, done, _), _ = jax.lax.scan(tick, (*begin, sums), jnp.arange(p.ticks, dtype=jnp.int32))
    return jax.tree.map(partial(_collected, p), done)


def _item(p: Pipeline, item: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Which micro-batch a stage works on, and in which round, when it has begun so many before. `stages` micro-batches
    go through all rounds together, then the next: the last stage's result is at the first just when it is needed."""
    item = jnp.clip(item, 0, p.rounds * p.micro_batches - 1)
    together, within = jnp.divmod(item, p.rounds * p.stages)
    turn, place = jnp.divmod(within, p.stages)
    return together * p.stages + place, turn


def _hand_on(p: Pipeline, y: Any, waiting: Any, t: jax.Array) -> tuple[Any, Any]:
    """What the stages begin tick `t` with, from what they made in the tick before: each its predecessor's, the first
    a micro-batch that waits, or in a later round the last one's.

    `waiting` is [stages, slots / stages, ...]. Where the first stage takes a micro-batch out of its part of a column,
    the column moves up by one stage, and the last one puts what it has finished into the free place.
    """
    together, within = jnp.divmod(t, p.rounds * p.stages)
    arrives = within < p.stages
    column = (together * p.stages + within) % (p.slots // p.stages)

    def one(y: jax.Array, waiting: jax.Array) -> tuple[jax.Array, jax.Array]:
        numbers = jnp.arange(p.stages, dtype=jnp.int32).reshape(-1, *[1] * (y.ndim - 1))
        old = jax.lax.dynamic_index_in_dim(waiting, column, axis=1, keepdims=False)
        new = jnp.where(numbers == p.stages - 1, y, rotate(old, AXIS, -1))
        x = jnp.where((numbers == 0) & arrives, old, rotate(y, AXIS, 1))
        waiting = jax.lax.dynamic_update_index_in_dim(waiting, jnp.where(arrives, new, old), column, axis=1)
        return shard_first_dim(x, AXIS), shard_first_dim(waiting, AXIS)

    pairs = jax.tree.map(one, y, waiting)
    return jax.tree.transpose(jax.tree.structure(y), jax.tree.structure((0, 0)), pairs)


def _collected(p: Pipeline, done: jax.Array) -> jax.Array:
    """Results in the order of the micro-batches. The visits left them `stages` columns on, and at the end of the slots
    where there are more of these than micro-batches."""
    empty = p.slots - p.micro_batches
    done = jnp.roll(done, (empty - p.stages) % done.shape[1], axis=1)
    done = done.reshape(p.slots, *done.shape[2:])
    return jnp.roll(done, -empty, axis=0) if empty else done


@jax.custom_vjp
def _sum_of(weight: jax.Array) -> jax.Array:
    """What goes through all ticks beside `weight`, untouched. Its gradient on the way back is the sum of those that
    `_summed_into` adds: in float32, in place, one layer's at a time. Left to jax, each tick's gradients of a whole
    stage would be made beside their sum, and summed in the weight's dtype. XLA drops the zeros on the way forward;
    they are made of the weight, so that where groups of rows are mapped over each group has its own sum."""
    return jnp.where(False, weight, jnp.zeros_like(weight)).astype(jnp.float32)


def _sum_backward(like: jax.Array, g: jax.Array) -> tuple[jax.Array]:
    return (g.astype(like.dtype),)


_sum_of.defvjp(lambda weight: (_sum_of(weight), jnp.zeros((), weight.dtype)), _sum_backward)


@jax.custom_vjp
def _summed_into(weights: Any, sums: Any, _: jax.Array) -> tuple[Any, Any]:
    """(weights, sums, place) -> both as they are; on the way back the weights' gradients join the sums at `place`."""
    return weights, sums


def _summed_forward(weights: Any, sums: Any, place: jax.Array) -> tuple[tuple[Any, Any], jax.Array]:
    return (weights, sums), place


def _summed_backward(place: jax.Array, gradients: tuple[Any, Any]) -> tuple[None, Any, None]:
    def add(g: jax.Array, total: jax.Array) -> jax.Array:
        before = jax.lax.dynamic_index_in_dim(total, place, keepdims=False)
        return jax.lax.dynamic_update_index_in_dim(total, before + g.astype(jnp.float32), place, 0)

    return None, jax.tree.map(add, *gradients), None


_summed_into.defvjp(_summed_forward, _summed_backward)


def _of_micro(tree: Any, batched: Any, micro: jax.Array) -> Any:
    return jax.tree.map(lambda leaf, own: leaf[micro] if own else leaf, tree, batched)


@jax.custom_vjp
def _picked(turn: jax.Array, weight: jax.Array) -> jax.Array:
    one = weight[0]
    for number in range(1, weight.shape[0]):
        one = jnp.where(turn == number, weight[number], one)
    return one


def _picked_forward(turn: jax.Array, weight: jax.Array) -> tuple[jax.Array, tuple[jax.Array, int]]:
    return _picked(turn, weight), (turn, weight.shape[0])


def _picked_backward(kept: tuple[jax.Array, int], g: jax.Array) -> tuple[None, jax.Array]:
    """A sum with what other rounds left, written at once: a scatter would first write zeros for all rounds."""
    turn, rounds = kept
    numbers = jnp.arange(rounds, dtype=jnp.int32).reshape(-1, *[1] * g.ndim)
    return None, jnp.where(numbers == turn, g[None], jnp.zeros_like(g))


_picked.defvjp(_picked_forward, _picked_backward)


def _pick(turn: jax.Array, weight: jax.Array) -> jax.Array:
    """This round's weights out of [rounds, ...]."""
    return weight[0] if weight.shape[0] == 1 else _picked(turn, weight)
