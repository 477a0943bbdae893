"""Applying a stack of layers: a scan over layers with recompute, or pipeline stages under `jax.vmap` over
micro-batches."""

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
from jaxmem.stack.layer_ranges import Run, layer_ranges
from jaxmem.stack.remat import Remat, policy
from jaxmem.stack.schedule import Schedule, schedule
from jaxmem.stack.stages import Pipeline

# (module, x, input of this layer, shared inputs) -> (x, output of this layer)
Layer = Callable[[Any, Any, Any, Any], tuple[Any, Any]]


@dataclass(frozen=True)
class StackOptions:
    """Settings for applying a stack, independent of its layers."""

    remat: Remat = "none"  # the name of a policy, or the names of saved activations
    pipeline: Pipeline | None = None
    host: tuple[
        str, ...
    ] = ()  # names of activations that are offloaded to host memory; with BOUNDARY all saved activations


@dataclass(frozen=True)
class StackCall:
    """A stack that is about to be applied, passed to the handler of `stack.cut_by`."""

    run: Run  # (weights of a layer, x, the layer's own input, inputs shared by all layers) -> (x, output)
    weights: Any  # of all layers, stacked
    x: Any
    inputs: Any
    beside: Any
    on_host: bool = False  # whether saved activations are offloaded to host memory
    plan: Schedule | None = None  # the boundaries to save; None: all, and the activations that `run` saves


def apply_stack(
    blocks: nnx.Module,
    layer: Layer,
    x: Any,
    inputs: Any = None,
    beside: Any = None,
    *,
    options: StackOptions = StackOptions(),
) -> tuple[Any, Any]:
    """Applies `layer(block, x, input, beside)` for each of `blocks`, modules of one kind stacked by `stacked`, and
    returns (x, outputs).

    `inputs` has an entry for each layer (keys, caches), stacked; `beside` is shared by all layers (positions, document
    ids). The outputs of the layers are stacked.

    With `options.pipeline` the layers are distributed over stages, and `jax.vmap` over micro-batches pipelines them
    with their `inputs` and `beside`: `layer` must not close over arrays of a micro-batch.
    """
    graphdef, state = nnx.split(blocks)
    weights = nnx.to_pure_dict(state)

    def run(weights: Any, x: Any, one: Any, beside: Any) -> tuple[Any, Any]:
        return layer(nnx.merge(graphdef, apply_hooks(fetch_from_host(weights))), x, one, beside)

    if options.pipeline is not None:
        return _pipelined(options.pipeline, run, options.remat)(weights, x, inputs, beside)
    forms = {(*group, *leaf.shape[1:]) for leaf in jax.tree.leaves(weights) for group in ((), vmap_groups())}
    layers = jax.tree.leaves(weights)[0].shape[0]
    parts = layer_ranges(weights)
    if len(parts) == 1:
        return _apply_range(run, weights, x, inputs, beside, layers, options, forms)
    forms |= {(*group, size, *form) for form in forms for size in (1, layers) for group in ((), vmap_groups())}
    outputs = []
    for section in parts:
        own_run, own, own_inputs, own_beside = section.restrict(run, weights, inputs, beside)
        x, output = _apply_range(own_run, own, x, own_inputs, own_beside, section.stop - section.start, options, forms)
        outputs.append(output)
    return x, jax.tree.map(lambda *parts: jnp.concatenate(parts), *outputs)


def _apply_range(
    run: Run,
    weights: Any,
    x: Any,
    inputs: Any,
    beside: Any,
    layers: int,
    options: StackOptions,
    forms: set[tuple[int, ...]],
) -> tuple[Any, Any]:
    """`forms` are the shapes of the weights of a layer."""
    on_host, fetches = BOUNDARY in options.host, bool(jax.tree.leaves(host_leaves(weights)))
    # Boundaries or weights in host memory use a schedule that saves every boundary, since it copies one layer ahead.
    ahead = options.remat == "full" and not is_cut() and (options.host == (BOUNDARY,) or (fetches and not options.host))
    remat = "every_1" if ahead else options.remat
    plan = schedule(remat, layers)
    if plan is not None:
        if (result := cut(StackCall(run, weights, x, inputs, beside, on_host, plan))) is not None:
            return result
        from jaxmem.stack.scheduled import by_schedule

        return by_schedule(run, plan, on_host=on_host)(weights, x, inputs, beside)
    if is_cut() and on_host:  # the handler offloads saved activations
        keep = policy(options.remat, forms)
    else:
        keep, run = policy(options.remat, forms, options.host), _name_boundaries(run) if on_host else run
    # Inside of a scan XLA cannot merge the recomputation with the first pass, so no barrier is needed.
    run = jax.checkpoint(run, policy=keep, prevent_cse=False)
    if (result := cut(StackCall(run, weights, x, inputs, beside, on_host))) is not None:
        return result
    return jax.lax.scan(lambda x, one: run(one[0], x, one[1], beside), x, (weights, inputs))


def _name_boundaries(run: Run) -> Run:
    def with_name(weights: Any, x: Any, one: Any, beside: Any) -> tuple[Any, Any]:
        return run(weights, jax.tree.map(lambda leaf: checkpoint_name(leaf, BOUNDARY), x), one, beside)

    return with_name


def _pipelined(pipeline: Pipeline, run: Run, remat: Remat) -> Callable[..., tuple[Any, Any]]:
    """A pipeline under `jax.vmap` over micro-batches; without the vmap, one layer after the other."""
    from jaxmem.stack.pipeline import run_in_order, through_stages

    @custom_vmap
    def apply(weights: Any, x: Any, inputs: Any, beside: Any) -> tuple[Any, Any]:
        return run_in_order(pipeline, run, weights, x, inputs, beside)

    @apply.def_vmap
    def _(_: int, batched: Any, weights: Any, x: Any, inputs: Any, beside: Any) -> tuple[Any, Any]:
        x = through_stages(pipeline, run, weights, x, (inputs, batched[2]), (beside, batched[3]), remat)
        return (x, None), (jax.tree.map(lambda _: True, x), None)

    return apply


def stacked(make: Callable[[nnx.Rngs], nnx.Module], count: int, rngs: nnx.Rngs) -> Any:
    """`count` modules of one kind as one module, whose weights are stacked along a first axis `layer`.

    They are created one after the other, so that initialization needs one layer in addition to the stacked weights.
    """
    template = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
    graphdef, _ = nnx.split(template)
    keys = jax.random.split(rngs.params(), count)
    weights = jax.lax.map(lambda key: nnx.to_pure_dict(nnx.split(make(nnx.Rngs(key)))[1]), keys)
    module = nnx.merge(graphdef, weights)
    for _, variable in nnx.to_flat_state(nnx.state(module)):
        variable.set_metadata("axes", ("layer", *variable.get_metadata()["axes"]))
    return module
