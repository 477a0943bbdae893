"""Back through a stack of layers by a schedule of which boundaries are kept and which are made again.

The weights are indexed by layer wherever one runs, never handed to a loop in segments: those would be copies. Beside
the slots of the schedule the backward pass holds one layer's intermediates and its gradient. Of weights that lie on the
host the next layer's are on their way while one computes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem.sharding.host import device_leaves, fetch_layer, fill, to_device, to_host
from jaxmem.sharding.weights import StoredWeight
from jaxmem.stack.schedule import Schedule

Run = Callable[[Any, Any, Any, Any], tuple[Any, Any]]  # (one layer's weights, x, its input, beside) -> (x, output)


def first_pass(
    run: Run, plan: Schedule, weights: Any, x: Any, inputs: Any, beside: Any, *, on_host: bool
) -> tuple[Any, Any, Any]:
    """(x, stacked outputs, the boundaries in their slots)."""
    sent = to_host if on_host else lambda x: x
    every = _keeps_each(plan)

    def keep(slots: Any, one: tuple[Any, Any], weights: Any, x: Any) -> tuple[Any, Any, Any]:
        of_layer, slot = one
        kept = sent(x)
        slots = slots if every else _put(slots, slot, kept)
        x, output = run(weights, x, of_layer, beside)
        return x, slots, (output, kept if every else None)

    def room() -> Any:
        """Filled from x, so that the slots lie on the devices as x does; on the host one after the other, or all of
        them would be on the device first."""
        if on_host:
            return jax.lax.scan(lambda _, __: (None, sent(x)), None, length=plan.slots)[1]
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (plan.slots, *x.shape)), x)

    x, slots, (outputs, kept) = onward(keep, None if every else room(), weights, x, (inputs, _numbers(plan.first)))
    return x, outputs, kept if every else slots


def onward(step: Callable[..., Any], carried: Any, weights: Any, x: Any, inputs: Any) -> tuple[Any, Any, Any]:
    """Through all layers: `step(carried, its input, its weights, x)` gives (x, what is carried, what the layer gives).
    What lies on the host comes a layer ahead. (x, what is carried, what the layers gave)."""

    def one(carry: tuple[Any, Any, Any], of_layer: tuple[Any, Any, jax.Array]) -> tuple[tuple[Any, Any, Any], Any]:
        (x, carried, ready), (own, given, layer) = carry, of_layer
        following = fetch_layer(weights, layer + 1)
        x, carried, output = step(carried, given, fill(own, ready), x)
        return (x, carried, following), output

    numbers = jnp.arange(jax.tree.leaves((weights, inputs))[0].shape[0], dtype=jnp.int32)
    begin = x, carried, fetch_layer(weights, jnp.int32(0))
    (x, carried, _), outputs = jax.lax.scan(one, begin, (device_leaves(weights), inputs, numbers))
    return x, carried, outputs


def made_again(
    run: Run, plan: Schedule, weights: Any, slots: Any, inputs: Any, beside: Any, which: Any, *, on_host: bool
) -> Any:
    """The slots, when so many of the layers that run again (from one of them to before another) have run."""
    if not plan.again:
        return slots
    steps = jnp.asarray(plan.again, jnp.int32).reshape(-1, 3)

    def again(i: jax.Array, slots: Any) -> Any:
        layer, source, target = steps[i]
        x = _at(slots, source)
        x, _ = run(_at(weights, layer), to_device(x) if on_host else x, _at(inputs, layer), beside)
        return _put(slots, target, to_host(x) if on_host else x)

    with jax.named_scope(f"runs_{plan.runs}_in_{len(plan.at)}"):
        return jax.lax.fori_loop(which[0], which[1], again, slots)


def _keeps_each(plan: Schedule) -> bool:
    """Whether each boundary has a slot of its own, and none is made again."""
    return plan.first == tuple(range(len(plan.at)))


def by_schedule(run: Run, plan: Schedule, *, on_host: bool = False) -> Callable[[Any, Any, Any, Any], tuple[Any, Any]]:
    """(stacked weights, x, stacked inputs, beside) -> (x, stacked outputs), with a backward pass of its own. With
    `on_host` the boundaries wait in host memory."""
    back = to_device if on_host else lambda x: x
    every = _keeps_each(plan)

    @jax.custom_vjp
    def apply(weights: Any, x: Any, inputs: Any, beside: Any) -> tuple[Any, Any]:
        def step(_: None, one: Any, weights: Any, x: Any) -> tuple[Any, None, Any]:
            x, output = run(weights, x, one, beside)
            return x, None, output

        x, _, outputs = onward(step, None, weights, x, inputs)
        return x, outputs

    def forward(weights: Any, x: Any, inputs: Any, beside: Any) -> tuple[tuple[Any, Any], tuple[Any, ...]]:
        x, outputs, slots = first_pass(run, plan, weights, x, inputs, beside, on_host=on_host)
        return (x, outputs), (weights, slots, inputs, beside)

    def backward(kept: tuple[Any, ...], wanted: tuple[Any, Any]) -> tuple[Any, ...]:
        weights, slots, inputs, beside = kept

        def step(carry: tuple[Any, ...], one: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, Any]]:
            slots, ahead, ready, g, of_beside = carry
            layer, at, begin, end, of_output = one
            slots = made_again(run, plan, weights, slots, inputs, beside, (begin, end), on_host=on_host)
            x = ahead if every else back(_at(slots, at))
            ahead = back(_at(slots, jnp.maximum(at - 1, 0))) if every else None  # on its way while this layer computes
            following = fetch_layer(weights, layer - 1)
            through = _differentiated(run, layer_with(weights, layer, ready), x, _at(inputs, layer), beside)
            of_weights, g, of_input, more = through(g, of_output)
            return (slots, ahead, following, g, jax.tree.map(jnp.add, of_beside, more)), (of_weights, of_input)

        nothing = jax.tree.map(jnp.zeros_like, inexact_leaves(beside))
        each = (jnp.arange(len(plan.at), dtype=jnp.int32), *map(_numbers, (plan.at, plan.begin, plan.end)))
        ahead = back(_at(slots, jnp.int32(plan.at[-1]))) if every else None
        carry = (slots, ahead, fetch_layer(weights, jnp.int32(len(plan.at) - 1)), wanted[0], nothing)
        (*_, g, of_beside), (of_weights, of_inputs) = jax.lax.scan(step, carry, (*each, wanted[1]), reverse=True)
        return of_weights, g, of_inputs, of_beside

    apply.defvjp(forward, backward)
    return apply


def _differentiated(run: Run, weights: Any, x: Any, one: Any, beside: Any) -> Callable[[Any, Any], tuple[Any, ...]]:
    """(gradient of x, of the output) -> those of weights, x, input and beside; None for what is no real number."""

    def of_real(own: Any, x: Any, some: Any, others: Any) -> tuple[Any, Any]:
        return run(with_inexact(weights, own), x, with_inexact(one, some), with_inexact(beside, others))

    _, back = jax.vjp(of_real, inexact_leaves(weights), x, inexact_leaves(one), inexact_leaves(beside))
    return lambda g, of_output: back((g, of_output))


def _is_real(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def inexact_leaves(tree: Any) -> Any:
    """Of a weight that is no number, or has no gradient, what stands for it."""

    def of(leaf: Any) -> Any:
        at = leaf.at if isinstance(leaf, StoredWeight) else leaf
        return at if at is not None and _is_real(at) else None

    return jax.tree.map(of, tree, is_leaf=_is_point)


def with_inexact(tree: Any, numbers: Any) -> Any:
    """A tree with these numbers in the place of its own."""

    def of(leaf: Any, other: Any) -> Any:
        if other is None:
            return leaf
        return StoredWeight(leaf.stored, other) if isinstance(leaf, StoredWeight) else other

    return jax.tree.map(of, tree, numbers, is_leaf=_is_point)


def _is_point(x: Any) -> bool:
    return isinstance(x, StoredWeight)


def layer_with(stacked: Any, layer: jax.Array, ready: Any) -> Any:
    """One layer's weights, of which some have been brought."""
    return fill(_at(device_leaves(stacked), layer), ready)


def _numbers(values: tuple[int, ...]) -> jax.Array:
    return jnp.asarray(values, jnp.int32)


def _at(stacked: Any, i: jax.Array) -> Any:
    return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, i, keepdims=False), stacked)


def _put(stacked: Any, i: jax.Array, one: Any) -> Any:
    return jax.tree.map(lambda leaf, x: jax.lax.dynamic_update_index_in_dim(leaf, x, i, 0), stacked, one)
