"""Applying a stack of layers: a scan over layers with recompute.

A stack with some trainable layers is divided into ranges of consecutive layers that have the same trainable weights.
Frozen weights are not sliced into ranges, since a slice is a copy: each layer indexes the complete stack. If all
weights of a range, and all before it (also the embedding), are frozen, jax does not differentiate the range and saves
no activations of it. With the last N of L layers trainable, the backward pass, saved activations and gradients are as
large as for N layers.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxmem.config.names import BOUNDARY
from jaxmem.sharding.arrays import vmap_groups
from jaxmem.sharding.host import fetch_from_host, host_leaves, put_layer, take_layer
from jaxmem.sharding.weights import StoredWeight, apply_hooks, has_proxy, hooks_in_place, is_in_place, proxy_of
from jaxmem.stack.call import DEFAULTS, Run, StackCall, StackOptions, create_layers, intercept_with, intercepted
from jaxmem.stack.recompute_plan import recompute_plan
from jaxmem.stack.remat import Forms, policy, rounding, saved_as, saved_names
from jaxmem.typing import Tree

# (module, x, input of this layer, shared inputs) -> (x, output of this layer)
Layer = Callable[[Tree, Tree, Tree, Tree], tuple[Tree, Tree]]


def stack_call(
    blocks: nnx.Module,
    layer: Layer,
    x: Tree,
    inputs: Tree = None,
    shared: Tree = None,
    *,
    options: StackOptions = DEFAULTS,
) -> StackCall:
    """A call that applies the layers of a stack; `apply_call` returns (x, stacked outputs of the layers).

    Args:
        blocks: modules of one kind, stacked by `stacked`.
        layer: (block, x, input of this layer, shared inputs) -> (x, output). It must not close over arrays of a
            micro-batch.
        x: the input of the first layer.
        inputs: an entry for each layer, stacked (keys, caches).
        shared: what is the same for all layers (positions, document ids). `memory.update: during` divides arrays whose
            first dimension is that of x into micro-batches, here and, after that of layers, in `inputs`.
        options: how the stack is stored and applied.
    """
    graphdef, state = nnx.split(blocks)

    def run(weights: Tree, x: Tree, layer_input: Tree, shared: Tree) -> tuple[Tree, Tree]:
        return layer(nnx.merge(graphdef, apply_hooks(fetch_from_host(weights))), x, layer_input, shared)

    return StackCall(run, nnx.to_pure_dict(state), x, inputs, shared, options)


def apply_call(call: StackCall) -> tuple[Tree, Tree]:
    """Applies a stack. Returns (x, stacked outputs)."""
    if (result := intercepted(call)) is not None:
        return result
    if call.options.order is not None:
        return call.options.order.apply(call)
    # The shapes of the weights of a layer.
    forms = {(*group, *leaf.shape[1:]) for leaf in jax.tree.leaves(call.weights) for group in ((), vmap_groups())}
    ranges = layer_ranges(call.weights)
    if len(ranges) == 1:
        return _apply(call, forms)
    forms |= {(*group, size, *form) for form in forms for size in (1, call.layers) for group in ((), vmap_groups())}
    outputs = []
    x = call.x
    for start, stop in ranges:
        x, output = _apply(_restricted(replace(call, x=x), start, stop), forms)
        outputs.append(output)
    return x, jax.tree.map(lambda *parts: jnp.concatenate(parts), *outputs)


def result_shapes(call: StackCall) -> tuple[Tree, Tree]:
    """The shapes of the results of `apply_call`, which is not intercepted."""
    with intercept_with(lambda _: None):
        return jax.eval_shape(lambda: apply_call(call))


def _apply(call: StackCall, forms: Forms) -> tuple[Tree, Tree]:
    """Applies a stack, or a range of it."""
    call = checkpointed(call, call.layers, forms)
    if call.plan is not None:
        from jaxmem.stack.scheduled import by_plan

        return by_plan(call)
    if hooks_in_place(call.weights):
        return _scan_with_hooks(call)
    return jax.lax.scan(
        lambda x, layer_arrays: call.run(layer_arrays[0], x, layer_arrays[1], call.shared),
        call.x,
        (call.weights, call.inputs),
    )


def _scan_with_hooks(call: StackCall) -> tuple[Tree, Tree]:
    """A scan over layers whose backward pass writes the results of hooks in place. The forward pass carries the
    proxies, so the backward pass carries their gradients: first the arguments of the hooks, then their results."""
    leaves, form = jax.tree.flatten(call.weights, is_leaf=is_in_place)
    hooked = {n: w for n, w in enumerate(leaves) if is_in_place(w)}

    def step(carry: tuple[Tree, Tree], of_layer: tuple[Tree, Tree, jax.Array]) -> tuple[tuple[Tree, Tree], Tree]:
        x, proxies = carry
        stored, layer_input, layer = of_layer
        for n, w in hooked.items():
            stored[n], proxies[n] = _hooked_layer(w.hook, stored[n], proxies[n], layer)
        x, output = call.run(jax.tree.unflatten(form, stored), x, layer_input, call.shared)
        return (x, proxies), output

    stored = [w.stored if n in hooked else w for n, w in enumerate(leaves)]
    numbers = jnp.arange(call.layers, dtype=jnp.int32)
    begin = call.x, {n: w.proxy for n, w in hooked.items()}
    (x, proxies), outputs = jax.lax.scan(step, begin, (stored, call.inputs, numbers))
    return _with_first_gradient(x, proxies, {n: w.argument for n, w in hooked.items()}), outputs


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _hooked_layer(_: Tree, value: jax.Array, proxy: jax.Array, _layer: jax.Array) -> tuple[jax.Array, jax.Array]:
    return value, proxy


def _hooked_layer_backward(hook: Any, layer: jax.Array, gradients: tuple[jax.Array, jax.Array]) -> tuple[Any, ...]:
    g, results = gradients
    return None, put_layer(results, layer, hook(g, take_layer(results, layer))), None


_hooked_layer.defvjp(lambda _, value, proxy, layer: ((value, proxy), layer), _hooked_layer_backward)


@jax.custom_vjp
def _with_first_gradient(x: Tree, _proxies: Tree, _gradient: Tree) -> Tree:
    """Returns `x`. In the backward pass, the gradient of `_proxies` begins as `_gradient`."""
    return x


_with_first_gradient.defvjp(lambda x, _, gradient: (x, gradient), lambda gradient, g: (g, gradient, None))


def checkpointed(call: StackCall, layers: int, forms: Forms | None = None, *, fetches_ahead: bool = False) -> StackCall:
    """The call with its recompute policy. A policy that saves only some boundaries sets `plan`; any other wraps `run`
    in a `jax.checkpoint`.

    Args:
        call: the stack.
        layers: the number of its layers.
        forms: the shapes of the weights of a layer; None: those of the call.
        fetches_ahead: whether the caller itself offloads boundaries and copies the arrays of the next layer ahead
            (`reverse.py`).
    """
    options = call.options
    if forms is None:
        forms = {leaf.shape[1:] for leaf in jax.tree.leaves(call.weights)}
    fetches = bool(jax.tree.leaves(host_leaves(call.weights)))
    # If boundaries or weights are in host memory, use the schedule that saves every boundary, since it copies the
    # arrays of the next layer ahead.
    ahead = (
        options.remat == "full"
        and not fetches_ahead
        and (options.host == (BOUNDARY,) or (fetches and not options.host))
    )
    call = replace(call, plan=recompute_plan("every_1" if ahead else options.remat, layers))
    if call.plan is None:
        is_offloaded_later = fetches_ahead and call.on_host
        host = () if is_offloaded_later else options.host
        saved = saved_names(options.remat)
        run = call.run
        if options.in_fp8 and saved is not None:
            saved = (*saved, BOUNDARY)
            run = _saving_boundary(run, in_fp8=(*saved, *host))
        elif BOUNDARY in host:
            run = _saving_boundary(run)
        # Inside of a scan XLA cannot merge the recomputation with the first pass, so no barrier is needed.
        call = replace(call, run=jax.checkpoint(run, policy=policy(saved, forms, host), prevent_cse=False))
    return call


def _saving_boundary(run: Run, in_fp8: tuple[str, ...] = ()) -> Run:
    """The layer with a name for its input. Activations with the names `in_fp8` are saved in FP8."""

    def with_name(weights: Tree, x: Tree, layer_input: Tree, shared: Tree) -> tuple[Tree, Tree]:
        with rounding(in_fp8):
            return run(weights, jax.tree.map(lambda leaf: saved_as(leaf, BOUNDARY), x), layer_input, shared)

    return with_name


def stacked(make: Callable[[nnx.Rngs], nnx.Module], count: int, rngs: nnx.Rngs) -> Tree:
    """`count` modules of one kind as one module, whose weights are stacked along a first axis `layer`.

    They are created one after the other, so that initialization needs the memory of the stacked weights and of one
    layer.
    """
    template = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
    graphdef, _ = nnx.split(template)
    keys = jax.random.split(rngs.params(), count)
    weights = create_layers(lambda key: nnx.to_pure_dict(nnx.split(make(nnx.Rngs(key)))[1]), keys)
    module = nnx.merge(graphdef, weights)
    for _, variable in nnx.to_flat_state(nnx.state(module)):
        variable.set_metadata("axes", ("layer", *variable.get_metadata()["axes"]))
    return module


def layer_ranges(weights: Tree) -> list[tuple[int, int]]:
    """The first layer of each range and the layer after it; a single range if no weight is trainable in some layers
    only."""
    leaves = jax.tree.leaves(weights, is_leaf=has_proxy)
    count = leaves[0].shape[0]
    learning = [{*layers} for layers in map(trainable_layers, leaves) if layers is not None]
    edges = [n for n in range(1, count) if any((n in layers) != (n - 1 in layers) for layers in learning)]
    return list(pairwise((0, *edges, count)))


def _restricted(call: StackCall, start: int, stop: int) -> StackCall:
    """The same call for the layers of a range only."""
    leaves, form = jax.tree.flatten(call.weights, is_leaf=has_proxy)
    numbers = jnp.arange(start, stop, dtype=jnp.int32)
    # `proxy=None`: frozen weights have no gradient, even if `shared` is differentiated.
    frozen = [StoredWeight(leaf.stored, None) if isinstance(leaf, StoredWeight) else None for leaf in leaves]

    def run(proxies: list[Tree], x: Tree, numbered: Tree, shared: Tree) -> tuple[Tree, Tree]:
        number, layer_input = numbered
        frozen, shared_inputs = shared
        layer = [
            proxy if frozen_leaf is None else StoredWeight(take_layer(frozen_leaf.stored, number), proxy)
            for proxy, frozen_leaf in zip(proxies, frozen, strict=True)
        ]
        return call.run(jax.tree.unflatten(form, layer), x, layer_input, shared_inputs)

    def trainable(leaf: Tree) -> Tree:
        """The trainable part of a weight in this range, or None."""
        layers = trainable_layers(leaf)
        if layers is not None and start not in layers:
            return None
        first = start if layers is None else layers.index(start)
        return jax.tree.map(lambda x: x[first : first + stop - start], proxy_of(leaf))

    inputs = numbers, jax.tree.map(lambda x: x[start:stop], call.inputs)
    return replace(call, run=run, weights=list(map(trainable, leaves)), inputs=inputs, shared=(frozen, call.shared))


def trainable_layers(weight: Tree) -> tuple[int, ...] | None:
    """The trainable layers of a stacked weight, if only some are trainable."""
    return weight.layers if isinstance(weight, StoredWeight) else None
