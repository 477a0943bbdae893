"""A stack of layers over the mesh axis `stage`: micro-batches pass through the stages one after the other.

All devices run one program (Xu et al., arXiv:2105.04663): the inputs of all stages are one array, sharded over `stage`;
each tick runs every stage on its shard and sends the results to the next stage by a collective-permute. `stages.py` has
the schedule.

For L layers on p stages, m micro-batches, v rounds, B bytes of the input of a layer for one micro-batch, and K bytes
that `memory.remat` saves per layer, each device saves (m + (p - 1) / v) (L / p) K bytes for the backward pass: for 1/p
of the layers, but for all micro-batches at once. The inputs and outputs of the stack are distributed over the stages,
(m / p) B each. In each tick a stage sends 2 B: its result to the next stage, and one of these inputs or outputs to the
stage before. Weights are not sent. In the ticks of the bubble a device computes results that are discarded.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from jaxmem.sharding import rotate, shard_first_dim, vmap_groups
from jaxmem.stack.cuts import StackCall
from jaxmem.stack.remat import Remat, policy
from jaxmem.stack.stages import Pipeline

AXIS = "stage"


def apply_pipeline(pipeline: Pipeline, call: StackCall, remat: Remat) -> tuple[Any, Any]:
    """Applies a stack: a pipeline under `jax.vmap` over micro-batches; without the vmap, one layer after the other."""

    @custom_vmap
    def apply(weights: Any, x: Any, inputs: Any, shared: Any) -> tuple[Any, Any]:
        return _in_order(pipeline, replace(call, weights=weights, x=x, inputs=inputs, shared=shared))

    @apply.def_vmap
    def _(_: int, batched: Any, weights: Any, x: Any, inputs: Any, shared: Any) -> tuple[Any, Any]:
        _, _, has_micro_inputs, has_micro_shared = batched
        own = replace(call, weights=weights, x=x, inputs=inputs, shared=shared)
        x = _through_stages(pipeline, own, has_micro_inputs, has_micro_shared, remat)
        return (x, None), (jax.tree.map(lambda _: True, x), None)

    return apply(call.weights, call.x, call.inputs, call.shared)


def _in_order(pipeline: Pipeline, call: StackCall) -> tuple[Any, Any]:
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


def _through_stages(p: Pipeline, call: StackCall, has_micro_inputs: Any, has_micro_shared: Any, remat: Remat) -> Any:
    """Applies all layers to all micro-batches, which are stacked and padded to `p.slots`. The two trees of flags mark
    the leaves of `call.inputs` and `call.shared` that have a dimension of micro-batches."""
    weights = call.weights
    shapes = {leaf.shape[1:] for leaf in jax.tree.leaves(weights)}
    seen = {
        (*group, p.stages, *rounds, *shape)
        for shape in shapes for rounds in ((), (p.rounds,)) for group in ((), vmap_groups())
    }  # fmt: skip
    places = jnp.arange(p.group, dtype=jnp.int32)
    stages = jnp.arange(p.stages, dtype=jnp.int32)

    def layer(weights: Any, x: Any, sums: Any, place: jax.Array, stage: jax.Array, item: jax.Array) -> Any:
        """Applies one layer. Everything that depends on the tick is indexed inside this function; otherwise it would
        be saved for each tick. The barrier makes the weights depend on the tick too; otherwise jax would gather the
        weights of all layers before the first tick."""
        weights, item = jax.lax.optimization_barrier((weights, item))
        weights, sums = _sum_into(weights, sums, place)
        micro, turn = _item(p, item)
        number = (turn * p.stages + stage) * p.group + place
        shared = _of_micro(call.shared, has_micro_shared, micro)
        inputs = _of_micro(call.inputs, has_micro_inputs, micro)
        one = jax.tree.map(lambda leaf: leaf[jnp.minimum(number, p.layers - 1)], inputs)
        own = jax.tree.map(lambda weight: weight[0] if p.rounds == 1 else _pick(turn, weight), weights)
        y, _ = call.run(own, x, one, shared)
        if p.stored == p.layers:
            return y, sums
        return jax.tree.map(lambda y, x: jnp.where(number < p.layers, y, x), y, x), sums

    again = partial(jax.checkpoint, policy=policy(remat, seen), prevent_cse=False)
    size = p.layers_per_boundary(remat)

    def stage(weights: Any, x: Any, sums: Any, stage: jax.Array, item: jax.Array) -> Any:
        if size == 1:
            step = lambda carry, xs: (again(layer)(xs[0], *carry, xs[1], stage, item), None)  # noqa: E731
            return jax.lax.scan(step, (x, sums), (weights, places))[0]

        @again
        def one(x: Any, sums: Any, place: jax.Array) -> tuple[Any, Any]:
            """Indexes the weights within the tick. Passing the weights of a segment, or indexing them earlier, would
            copy them."""
            place, now = jax.lax.optimization_barrier((place, item))
            own = jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, place, keepdims=False), weights)
            return layer(own, x, sums, place, stage, now)

        @again
        def segment(x: Any, sums: Any, places: jax.Array) -> tuple[Any, Any]:
            return jax.lax.scan(lambda carry, place: (one(*carry, place), None), (x, sums), places)[0]

        full = places[: p.group // size * size].reshape(-1, size)
        carry, _ = jax.lax.scan(lambda carry, places: (segment(*carry, places), None), (x, sums), full)
        return segment(*carry, places[full.size :]) if full.size < p.group else carry

    staged = jax.tree.map(lambda leaf: shard_first_dim(p.split(leaf), AXIS), weights)
    sums = jax.tree.map(lambda leaf: shard_first_dim(_sum_of(leaf), AXIS), staged)
    staged = jax.lax.stop_gradient(staged)  # its gradient is in the sums
    waiting = jax.tree.map(lambda leaf: shard_first_dim(leaf.reshape(p.stages, -1, *leaf.shape[1:]), AXIS), call.x)

    # `_pass_on` is linear, so without the checkpoint only its masks would be saved, which are as large as what they
    # mask. Each call makes a new partial: jax caches traces by function, and a trace contains its devices.
    pass_on = jax.checkpoint(partial(_pass_on, p))

    def tick(carry: tuple[Any, Any, Any], t: jax.Array) -> tuple[tuple[Any, Any, Any], None]:
        x, waiting, sums = carry
        y, sums = jax.vmap(stage, spmd_axis_name=AXIS)(staged, x, sums, stages, t - stages)
        return (*pass_on(y, waiting, t + 1), sums), None

    begin = pass_on(jax.tree.map(lambda leaf: jnp.zeros_like(leaf[:, 0]), waiting), waiting, jnp.int32(0))
    (_, done, _), _ = jax.lax.scan(tick, (*begin, sums), jnp.arange(p.ticks, dtype=jnp.int32))
    return jax.tree.map(partial(_collect, p), done)


def _item(p: Pipeline, item: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The micro-batch and round that a stage processes as work item `item`. Groups of `stages` micro-batches pass
    through all rounds, so that the result of the last stage reaches the first stage just when it is needed."""
    item = jnp.clip(item, 0, p.rounds * p.micro_batches - 1)
    group, within = jnp.divmod(item, p.rounds * p.stages)
    turn, place = jnp.divmod(within, p.stages)
    return group * p.stages + place, turn


def _pass_on(p: Pipeline, y: Any, waiting: Any, t: jax.Array) -> tuple[Any, Any]:
    """The inputs of the stages in tick `t`, from their outputs in the previous tick. The input of a stage is the
    output of the stage before; the input of the first stage is a waiting micro-batch, or in later rounds the output of
    the last stage.

    `waiting` is [stages, slots / stages, ...]; a column has one micro-batch per stage. When the first stage reads its
    micro-batch of a column, each other stage sends its own to the stage before, and the last stage stores its output
    in the position that becomes free.
    """
    group, within = jnp.divmod(t, p.rounds * p.stages)
    arrives = within < p.stages
    column = (group * p.stages + within) % (p.slots // p.stages)

    def one(y: jax.Array, waiting: jax.Array) -> tuple[jax.Array, jax.Array]:
        numbers = jnp.arange(p.stages, dtype=jnp.int32).reshape(-1, *[1] * (y.ndim - 1))
        old = jax.lax.dynamic_index_in_dim(waiting, column, axis=1, keepdims=False)
        new = jnp.where(numbers == p.stages - 1, y, rotate(old, AXIS, -1))
        x = jnp.where((numbers == 0) & arrives, old, rotate(y, AXIS, 1))
        waiting = jax.lax.dynamic_update_index_in_dim(waiting, jnp.where(arrives, new, old), column, axis=1)
        return shard_first_dim(x, AXIS), shard_first_dim(waiting, AXIS)

    pairs = jax.tree.map(one, y, waiting)
    return jax.tree.transpose(jax.tree.structure(y), jax.tree.structure((0, 0)), pairs)


def _collect(p: Pipeline, done: jax.Array) -> jax.Array:
    """The results in the order of the micro-batches. After the last tick they are shifted by `stages` columns. If
    there are more slots than micro-batches, the results are in the last slots."""
    empty = p.slots - p.micro_batches
    done = jnp.roll(done, (empty - p.stages) % done.shape[1], axis=1)
    done = done.reshape(p.slots, *done.shape[2:])
    return jnp.roll(done, -empty, axis=0) if empty else done


@jax.custom_vjp
def _sum_of(weight: jax.Array) -> jax.Array:
    """Zeros that are carried through all ticks with `weight`. Their gradient is the sum of the gradients that
    `_sum_into` adds, in float32, in place, one layer at a time. By default jax would store the gradients of a
    complete stage for a tick in addition to their sum, and sum in the dtype of the weight. XLA removes the zeros from
    the forward pass. They depend on the weight, so that under a vmap over groups of rows each group has its own sum."""
    return jnp.where(False, weight, jnp.zeros_like(weight)).astype(jnp.float32)


_sum_of.defvjp(lambda weight: (_sum_of(weight), jnp.zeros((), weight.dtype)), lambda like, g: (g.astype(like.dtype),))


@jax.custom_vjp
def _sum_into(weights: Any, sums: Any, _: jax.Array) -> tuple[Any, Any]:
    """(weights, sums, place) -> (weights, sums). The backward pass adds the gradients of the weights to the sums at
    `place`."""
    return weights, sums


def _sum_into_backward(place: jax.Array, gradients: tuple[Any, Any]) -> tuple[None, Any, None]:
    def add(g: jax.Array, total: jax.Array) -> jax.Array:
        before = jax.lax.dynamic_index_in_dim(total, place, keepdims=False)
        return jax.lax.dynamic_update_index_in_dim(total, before + g.astype(jnp.float32), place, 0)

    return None, jax.tree.map(add, *gradients), None


_sum_into.defvjp(lambda weights, sums, place: ((weights, sums), place), _sum_into_backward)


def _of_micro(tree: Any, batched: Any, micro: jax.Array) -> Any:
    return jax.tree.map(lambda leaf, own: leaf[micro] if own else leaf, tree, batched)


@jax.custom_vjp
def _pick(turn: jax.Array, weight: jax.Array) -> jax.Array:
    """The weights of a round, from [rounds, ...]."""
    one = weight[0]
    for number in range(1, weight.shape[0]):
        one = jnp.where(turn == number, weight[number], one)
    return one


def _pick_backward(saved: tuple[jax.Array, int], g: jax.Array) -> tuple[None, jax.Array]:
    """Uses `where`, because a scatter would first write zeros for all rounds."""
    turn, rounds = saved
    numbers = jnp.arange(rounds, dtype=jnp.int32).reshape(-1, *[1] * g.ndim)
    return None, jnp.where(numbers == turn, g[None], jnp.zeros_like(g))


_pick.defvjp(lambda turn, weight: (_pick(turn, weight), (turn, weight.shape[0])), _pick_backward)
