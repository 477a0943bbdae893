"""Applying a stack with a plan of saved and recomputed boundaries.

Weights are indexed inside of the loop; passing slices would copy them. In addition to the slots of the plan, the
backward pass stores the intermediates of one layer and its gradient. Weights in host memory are copied one layer ahead.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from jaxmem.kernels.scopes import run_count
from jaxmem.sharding.arrays import GROUPS
from jaxmem.sharding.host import device_leaves, host_leaves, put_layer, take_layer, to_device
from jaxmem.sharding.layout import Layout, current
from jaxmem.sharding.trees import fill
from jaxmem.sharding.weights import (
    StoredWeight,
    has_proxy,
    hooks_in_place,
    is_in_place,
    proxy_of,
    with_proxy,
    without_hooks_in_place,
)
from jaxmem.stack.call import Run, StackCall
from jaxmem.stack.recompute_plan import RecomputePlan
from jaxmem.typing import Tree


def first_pass(call: StackCall, plan: RecomputePlan) -> tuple[Tree, Tree, Tree]:
    """Returns (x, stacked outputs, saved boundaries)."""

    def step(slots: Tree, input_and_slot: tuple[Tree, Tree], weights: Tree, x: Tree) -> tuple[Tree, Tree, Tree]:
        layer_input, slot = input_and_slot
        boundary = call.save_boundary(x)
        slots = slots if plan.saves_all else put_layer(slots, slot, boundary)
        x, output = call.run(weights, x, layer_input, call.shared)
        return x, slots, (output, boundary if plan.saves_all else None)

    def empty_slots() -> Tree:
        """Slots filled with x, so that they are sharded like x. In host memory they are written one after the other;
        otherwise all of them would be on the device first."""
        if call.on_host:
            return jax.lax.scan(lambda _, __: (None, call.save_boundary(call.x)), None, length=plan.slots)[1]
        boundary = call.encode_boundary(call.x)
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (plan.slots, *x.shape)), boundary)

    slots = None if plan.saves_all else empty_slots()
    inputs = call.inputs, jnp.asarray(plan.forward_slots, jnp.int32)
    x, slots, (outputs, boundaries) = scan_layers(step, slots, call.weights, call.x, inputs)
    return x, outputs, boundaries if plan.saves_all else slots


def scan_layers(
    step: Callable[..., Any], carried: Tree, weights: Tree, x: Tree, inputs: Tree
) -> tuple[Tree, Tree, Tree]:
    """Applies the layers of a stack. Weights in host memory are copied one layer ahead.

    Args:
        step: (carried, input, weights, x) -> (x, carried, output), for a layer.
        carried: what layers pass on besides x.
        weights: the stacked weights.
        x: the input of the first layer.
        inputs: an entry for each layer, stacked.

    Returns:
        x, `carried`, and the stacked outputs.
    """

    def scanned(carry: tuple[Tree, ...], of_layer: tuple[Tree, ...]) -> tuple[tuple[Tree, ...], Tree]:
        x, carried, fetched = carry
        stored, layer_input, layer = of_layer
        following = fetch_layer(weights, layer + 1)
        x, carried, output = step(carried, layer_input, fill(stored, fetched), x)
        return (x, carried, following), output

    numbers = jnp.arange(jax.tree.leaves((weights, inputs))[0].shape[0], dtype=jnp.int32)
    begin = x, carried, fetch_layer(weights, jnp.int32(0))
    (x, carried, _), outputs = jax.lax.scan(scanned, begin, (device_leaves(weights), inputs, numbers))
    return x, carried, outputs


def recompute(
    call: StackCall, slots: Tree, layer: jax.Array, first: Tree = 0, read: Callable[[jax.Array], Tree] | None = None
) -> Tree:
    """The slots after the recomputation that the plan has before the backward pass of a layer.

    Args:
        call: the stack.
        slots: the saved boundaries.
        layer: the number of the layer.
        first: the first of its slots in `slots`.
        read: layer -> its weights and its input; None: from the stack.
    """
    plan = call.plan
    if plan is None or not plan.steps:
        return slots
    steps = jnp.asarray(plan.steps, jnp.int32).reshape(-1, 3)
    begin, end = (jnp.asarray(x, jnp.int32)[layer] for x in (plan.begin, plan.end))

    def again(i: jax.Array, slots: Tree) -> Tree:
        layer, source, target = steps[i]
        weights, layer_input = take_layer((call.weights, call.inputs), layer) if read is None else read(layer)
        x, _ = call.run(weights, call.load_boundary(take_layer(slots, first + source)), layer_input, call.shared)
        return put_layer(slots, first + target, call.save_boundary(x))

    with jax.named_scope(run_count(plan.runs, len(plan.backward_slots))):
        return jax.lax.fori_loop(begin, end, again, slots)


class _Carry(NamedTuple):
    """What the backward pass of a layer passes to that of the layer before it."""

    slots: Tree  # saved boundaries
    x: Tree  # the input of the layer, loaded ahead; None unless every boundary is saved
    fetched: Tree  # the weights of the layer that are in host memory, copied ahead
    g: Tree  # the gradient of the layer's output x
    of_shared: Tree  # the sum of the gradients of `shared`
    results: list[jax.Array]  # the results of the hooks, stacked


def by_plan(call: StackCall) -> tuple[Tree, Tree]:
    """Applies a stack and returns (x, stacked outputs); the backward pass follows `call.plan`."""
    plan = call.plan
    assert plan is not None

    @jax.custom_vjp
    def apply(weights: Tree, x: Tree, inputs: Tree, shared: Tree) -> tuple[Tree, Tree]:
        def step(_: None, layer_input: Tree, weights: Tree, x: Tree) -> tuple[Tree, None, Tree]:
            x, output = call.run(weights, x, layer_input, shared)
            return x, None, output

        x, _, outputs = scan_layers(step, None, weights, x, inputs)
        return x, outputs

    def forward(weights: Tree, x: Tree, inputs: Tree, shared: Tree) -> tuple[tuple[Tree, Tree], tuple[Tree, ...]]:
        x, outputs, slots = first_pass(replace(call, weights=weights, x=x, inputs=inputs, shared=shared), plan)
        return (x, outputs), (weights, slots, inputs, shared, available_after(x, jnp.int32(call.layers - 1)))

    def backward(saved: tuple[Tree, ...], gradients: tuple[Tree, Tree]) -> tuple[Tree, ...]:
        stored, slots, inputs, shared, last = saved
        hooked = hooks_in_place(stored)  # all trainable weights of the stack, or none
        weights = without_hooks_in_place(stored)
        saved_call = replace(call, run=_in_groups(call.run), weights=weights, inputs=inputs, shared=shared)

        def step(carry: _Carry, of_step: tuple[jax.Array, jax.Array, Tree]) -> tuple[_Carry, tuple[Tree, Tree]]:
            layer, slot, of_output = of_step
            slots = recompute(saved_call, carry.slots, layer)
            x = carry.x if plan.saves_all else call.load_boundary(take_layer(slots, slot))
            # The previous layer is copied while this layer computes.
            previous_x = call.load_boundary(take_layer(slots, jnp.maximum(slot - 1, 0))) if plan.saves_all else None
            previous = fetch_layer(weights, layer - 1)
            layer_weights = layer_with(weights, layer, carry.fetched)
            derivative = _derivative(call.run, layer_weights, x, take_layer(inputs, layer), shared)
            of_weights, g, of_input, of_layer_shared = derivative(carry.g, of_output)
            results = carry.results
            if hooked:
                # Written in place: until then, a layer has the arguments of its hooks there.
                of_hooks = zip(hooked, results, jax.tree.leaves(of_weights), strict=True)
                results = [
                    put_layer(result, layer, weight.hook(gradient, take_layer(result, layer)))
                    for weight, result, gradient in of_hooks
                ]
                of_weights = None
            of_shared = jax.tree.map(jnp.add, carry.of_shared, of_layer_shared)
            return _Carry(slots, previous_x, previous, g, of_shared, results), (of_weights, of_input)

        zeros = jax.tree.map(jnp.zeros_like, inexact_leaves(shared))
        layers = jnp.asarray(range(call.layers), jnp.int32)
        backward_slots = jnp.asarray(plan.backward_slots, jnp.int32)
        x = call.load_boundary(take_layer(slots, jnp.int32(plan.backward_slots[-1]))) if plan.saves_all else None
        begin = _Carry(slots, x, fetch_layer(weights, last), gradients[0], zeros, [w.argument for w in hooked])
        end, (of_weights, of_inputs) = jax.lax.scan(step, begin, (layers, backward_slots, gradients[1]), reverse=True)
        if hooked:
            of_hooked = [w.gradient(result) for w, result in zip(hooked, end.results, strict=True)]
            form = jax.tree.structure(inexact_leaves(stored), is_leaf=is_in_place)
            of_weights = jax.tree.unflatten(form, of_hooked)
        return _gradients_like(stored, of_weights), end.g, of_inputs, end.of_shared

    apply.defvjp(forward, backward)
    return apply(call.weights, call.x, call.inputs, call.shared)


def _in_groups(run: Run) -> Run:
    """`run` in a backward pass, where jax does not bind the axis of the groups of rows."""
    layout = current()
    if layout is None or not layout.vmapped:
        return run

    @custom_vmap
    def of_group(*arguments: Tree) -> tuple[Tree, Tree]:
        """Traced once for its shapes."""
        with replace(layout, vmapped=()):
            return run(*arguments)

    @of_group.def_vmap
    def _(_: int, batched: list[Tree], *arguments: Tree) -> tuple[tuple[Tree, Tree], Tree]:
        results = _mapped(run, batched, layout)(*arguments)
        return results, jax.tree.map(lambda _: True, results)

    return of_group


def _mapped(run: Run, batched: Sequence[Tree], layout: Layout) -> Run:
    """`run` for all groups of rows. `batched`: which of its arguments differ between groups."""
    in_axes = jax.tree.map(lambda is_batched: 0 if is_batched else None, tuple(batched))
    return jax.vmap(run, in_axes=in_axes, axis_name=GROUPS, spmd_axis_name=layout.vmapped)


def _derivative(run: Run, *arguments: Tree) -> Callable[[Tree, Tree], tuple[Tree, ...]]:
    """Returns a function: (gradients of x and of the output) -> (gradients of weights, x, input and shared inputs).
    Arrays of integers and PRNG keys have None as their gradient."""
    layout = current()
    if layout is None or not layout.vmapped:
        return lambda *g: _gradients(run, arguments, g)

    @custom_vmap
    def of_group(arguments: Tree, g: Tree) -> Tree:
        """Traced once for its shapes, where the axis of the groups is not bound."""
        with replace(layout, vmapped=()):
            return _gradients(run, arguments, g)

    # `jax.vmap` does not support the residuals of a differentiated `shard_map`. So `run` is first mapped over groups of
    # rows, and the mapped function is differentiated.
    @of_group.def_vmap
    def _(groups: int, batched: Tree, arguments: Tree, g: Tree) -> tuple[Tree, Tree]:
        mapped = _mapped(run, batched[0], layout)
        every = lambda x, is_batched: x if is_batched else jnp.broadcast_to(x, (groups, *x.shape))  # noqa: E731
        gradients = _gradients(mapped, arguments, jax.tree.map(every, g, batched[1]))
        # The gradient of an argument that all groups share is the sum over groups, and not batched.
        return gradients, inexact_leaves(arguments, batched[0])

    return lambda *g: of_group(arguments, g)


def _gradients(run: Run, arguments: Tree, g: Tree) -> Tree:
    _, back = jax.vjp(lambda leaves: run(*with_inexact(arguments, leaves)), inexact_leaves(arguments))
    return back(g)[0]


def inexact_leaves(tree: Tree, values: Tree = None) -> Tree:
    """The leaves that have a gradient: floating-point arrays, and the proxies of stored weights; None for others. With
    `values`, a tree of the same structure, the leaves of that tree at the same places."""

    def of(leaf: Tree, value: Tree) -> Tree:
        proxy = proxy_of(leaf)
        return proxy_of(value) if proxy is not None and jnp.issubdtype(proxy.dtype, jnp.inexact) else None

    return jax.tree.map(of, tree, tree if values is None else values, is_leaf=has_proxy)


def with_inexact(tree: Tree, leaves: Tree) -> Tree:
    """The tree with its `inexact_leaves` replaced."""

    def of(leaf: Tree, new: Tree) -> Tree:
        return leaf if new is None else with_proxy(leaf, new)

    return jax.tree.map(of, tree, leaves, is_leaf=has_proxy)


def _gradients_like(tree: Tree, gradients: Tree) -> Tree:
    """The gradients of `inexact_leaves`, with the structure of the tree. A stored array has no gradient."""

    def of(leaf: Tree, g: Tree) -> Tree:
        return StoredWeight(None, g) if isinstance(leaf, StoredWeight) else g  # type: ignore[arg-type]

    return jax.tree.map(of, tree, gradients, is_leaf=has_proxy)


def layer_with(stacked: Tree, layer: jax.Array, fetched: Tree) -> Tree:
    """The weights of one layer, some of which have been copied from host memory."""
    return fill(take_layer(device_leaves(stacked), layer), fetched)


def available_after(x: Tree, layer: jax.Array) -> jax.Array:
    """The number of a layer, available only after `x` is computed. Otherwise XLA copies the first weights of the
    backward pass from host memory before the forward pass, and stores them during all of it."""
    return jax.lax.optimization_barrier((x, layer))[1]


def fetch_layer(stacked: Tree, layer: jax.Array) -> Tree:
    """One layer of `host_leaves`, copied to the device. An index beyond either end is clipped; its result
    is not used."""
    return jax.tree.map(lambda x: to_device(take_layer(x, jnp.clip(layer, 0, x.shape[0] - 1))), host_leaves(stacked))
