"""One layer after the other, as a scan, which goes back by a schedule where boundaries are not all kept; or, under
`jax.vmap` over micro-batches, through the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import custom_vmap

from jaxmem.config.names import BOUNDARY
from jaxmem.sharding import vmap_groups
from jaxmem.sharding.host import fetch_from_host, host_leaves
from jaxmem.sharding.weights import apply_hooks
from jaxmem.stack.cuts import cut, is_cut
from jaxmem.stack.pipeline import Pipeline, in_order, through_stages
from jaxmem.stack.remat import Remat, policy
from jaxmem.stack.schedule import Schedule, schedule
from jaxmem.stack.scheduled import by_schedule
from jaxmem.stack.sections import Run, layer_ranges

# (module, x, this layer's input, what every layer sees) -> (x, this layer's output)
Layer = Callable[[Any, Any, Any, Any], tuple[Any, Any]]


@dataclass(frozen=True)
class StackOptions:
    """How a stack is applied, whatever its layers are."""

    remat: Remat = "none"  # the name of a policy, or the names of what is kept
    pipeline: Pipeline | None = None
    host: tuple[str, ...] = ()  # by name, what waits in host memory; with BOUNDARY all that is kept


@dataclass(frozen=True)
class StackCall:
    """A stack that is being applied: all that it takes to do it."""

    run: Run  # (a layer's weights, x, its input, beside) -> (x, output)
    weights: Any  # of all layers, stacked
    x: Any
    inputs: Any
    beside: Any
    on_host: bool = False  # whether what is kept for the backward pass waits in host memory
    plan: Schedule | None = None  # which boundaries are kept; None: all, with what `run` says of each layer


def apply_stack(
    blocks: nnx.Module,
    layer: Layer,
    x: Any,
    inputs: Any = None,
    beside: Any = None,
    *,
    options: StackOptions = StackOptions(),
) -> tuple[Any, Any]:
    """Run `x` through `blocks`, modules of one kind stacked by `stacked`: `layer(block, x, input, beside)` for each.

    `inputs` holds something for each layer (keys, caches), stacked likewise; `beside` is what every layer sees of
    the batch (positions, documents). What the layers give beside `x` comes back stacked.

    With `options.pipeline` the layers lie on stages. `jax.vmap` over micro-batches then sends these through the stages
    one behind the other, with what belongs to them: `layer` must not close over anything of a micro-batch.
    """
    graphdef, state = nnx.split(blocks)
    weights = nnx.to_pure_dict(state)

    def run(weights: Any, x: Any, one: Any, beside: Any) -> tuple[Any, Any]:
        return layer(nnx.merge(graphdef, apply_hooks(fetch_from_host(weights))), x, one, beside)

    if options.pipeline is not None:
        return _staged(options.pipeline, run, options.remat)(weights, x, inputs, beside)
    forms = {(*group, *leaf.shape[1:]) for leaf in jax.tree.leaves(weights) for group in ((), vmap_groups())}
    layers = jax.tree.leaves(weights)[0].shape[0]
    parts = layer_ranges(weights)
    if len(parts) == 1:
        return _in_turn(run, weights, x, inputs, beside, layers, options, forms)
    forms |= {(*group, size, *form) for form in forms for size in (1, layers) for group in ((), vmap_groups())}
    outputs = []
    for section in parts:
        own_run, own, own_inputs, own_beside = section.of(run, weights, inputs, beside)
        x, output = _in_turn(own_run, own, x, own_inputs, own_beside, section.stop - section.start, options, forms)
        outputs.append(output)
    return x, jax.tree.map(lambda *parts: jnp.concatenate(parts), *outputs)


def _in_turn(
    run: Run,
    weights: Any,
    x: Any,
    inputs: Any,
    beside: Any,
    layers: int,
    options: StackOptions,
    forms: set[tuple[int, ...]],
) -> tuple[Any, Any]:
    """`forms`: the shapes that weights are seen in."""
    on_host, fetches = BOUNDARY in options.host, bool(jax.tree.leaves(host_leaves(weights)))
    # Boundaries alone, or weights, come by a schedule that keeps each: it fetches the next one while a layer computes.
    ahead = options.remat == "full" and not is_cut() and (options.host == (BOUNDARY,) or (fetches and not options.host))
    remat = "every_1" if ahead else options.remat
    plan = schedule(remat, layers)
    if plan is not None:
        if (result := cut(StackCall(run, weights, x, inputs, beside, on_host, plan))) is not None:
            return result
        return by_schedule(run, plan, on_host=on_host)(weights, x, inputs, beside)
    if is_cut() and on_host:  # what is kept is in sight, and moved there
        keep = policy(options.remat, forms)
    else:
        keep, run = policy(options.remat, forms, options.host), _named(run) if on_host else run
    # Inside scan the loop already keeps XLA from merging the recomputation with the first pass.
    run = jax.checkpoint(run, policy=keep, prevent_cse=False)
    if (result := cut(StackCall(run, weights, x, inputs, beside, on_host))) is not None:
        return result
    return jax.lax.scan(lambda x, one: run(one[0], x, one[1], beside), x, (weights, inputs))


def _named(run: Run) -> Run:
    def of_named(weights: Any, x: Any, one: Any, beside: Any) -> tuple[Any, Any]:
        return run(weights, jax.tree.map(lambda leaf: checkpoint_name(leaf, BOUNDARY), x), one, beside)

    return of_named


def _staged(pipeline: Pipeline, run: Run, remat: Remat) -> Callable[..., tuple[Any, Any]]:
    """One micro-batch by itself sees layer after layer; all of them together, a pipeline."""

    @custom_vmap
    def apply(weights: Any, x: Any, inputs: Any, beside: Any) -> tuple[Any, Any]:
        return in_order(pipeline, run, weights, x, inputs, beside)

    @apply.def_vmap
    def _(_: int, batched: Any, weights: Any, x: Any, inputs: Any, beside: Any) -> tuple[Any, Any]:
        x = through_stages(pipeline, run, weights, x, (inputs, batched[2]), (beside, batched[3]), remat)
        return (x, None), (jax.tree.map(lambda _: True, x), None)

    return apply


def stacked(make: Callable[[nnx.Rngs], nnx.Module], count: int, rngs: nnx.Rngs) -> Any:
    """`count` modules of one kind as one, its weights stacked along a first dimension `layer`.

    They are made one after the other, so that initialising never needs more than one layer beside the weights.
    """
    template = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
    graphdef, _ = nnx.split(template)
    keys = jax.random.split(rngs.params(), count)
    weights = jax.lax.map(lambda key: nnx.to_pure_dict(nnx.split(make(nnx.Rngs(key)))[1]), keys)
    module = nnx.merge(graphdef, weights)
    for _, variable in nnx.to_flat_state(nnx.state(module)):
        variable.set_metadata("axes", ("layer", *variable.get_metadata()["axes"]))
    return module
