"""A stack's two passes with the layers in sight: what happens to a layer's gradient is said before the next is made.

jax's own backward pass gives the gradients of all layers at the end. Here `forward` keeps of each layer what its
recomputation policy says, and `backward` goes through the layers from the last to the first and hands each gradient
to a visitor, who may change that layer's weights: they are needed no more. N layers of W bytes of gradients: W bytes
in place of N W, and no operation more (Lv et al., arXiv:2306.09782).

Of a batch in micro-batches every layer goes back through all of them before its gradient is handed over, which is
their sum in float32. What is kept is then that of all micro-batches, what a layer computes with that of one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxmem.sharding import current
from jaxmem.sharding.host import fetch_layer, to_device, to_host
from jaxmem.sharding.weights import differentiable, with_gradients
from jaxmem.stack.apply import StackCall
from jaxmem.stack.schedule import Schedule
from jaxmem.stack.scheduled import first_pass, layer_with, made_again, onward

# (what is carried, layer, the gradient of its weights, what was made ready for it) -> what is carried
Visit = Callable[[Any, jax.Array, Any, Any], Any]
Derivative = Callable[[Any], tuple[Any, Any]]  # of what a layer gave -> of its weights and of what went in
Ready = Callable[[Any, jax.Array], Any]  # (what is carried, layer)


@dataclass(frozen=True)
class ForwardPass(ABC):
    """A stack after its forward pass."""

    applied: StackCall
    y: Any
    dtype: DTypeLike | None  # of gradients; None: each in its weight's own
    learns: Any  # whether weights have a gradient: of each, or of all
    micro: int  # micro-batches, which lie among the rows as `together` puts them

    @property
    def layers(self) -> int:
        count: int = jax.tree.leaves(self.applied.weights)[0].shape[0]
        return count

    def backward(
        self, g: Any, weights: Callable[[Any], Any], visit: Visit, carried: Any, ready: Ready = lambda *_: None
    ) -> tuple[Any, Any]:
        """What is carried in the end, and the gradient of the stack's x. `weights` finds the stacked weights in what
        is carried; `ready` is asked before a layer's gradient is made, and what it brings may come meanwhile."""
        beside = split_micro_batches(self.applied.beside, self.micro)

        def step(turn: jax.Array, state: tuple[Any, ...]) -> tuple[Any, ...]:
            carried, g, ahead, coming = state
            layer = self.layers - 1 - turn
            stacked = weights(carried)
            own, one = layer_with(stacked, layer, coming), take_layer(self.applied.inputs, layer)
            coming = fetch_layer(stacked, layer - 1)
            kept, ahead = self._at(layer, stacked, ahead)
            brought = ready(carried, layer)
            dw, dx = self._gradients(own, split_micro_batches(one, self.micro), beside, kept, g)
            # Before a visitor writes what it read: or XLA would keep, or copy, what weights were until all is done.
            layer, dw, dx, brought = jax.lax.optimization_barrier((layer, dw, dx, brought))
            return visit(carried, layer, dw, brought), dx, ahead, coming

        last = fetch_layer(weights(carried), jnp.int32(self.layers - 1))
        begin = carried, split_micro_batches(g, self.micro), self._begin(), last
        carried, g, *_ = jax.lax.fori_loop(0, self.layers, step, begin)
        return carried, merge_micro_batches(g, self.micro)

    @abstractmethod
    def _begin(self) -> Any:
        """What goes from layer to layer beside the gradient."""

    @abstractmethod
    def _at(self, layer: jax.Array, weights: Any, ahead: Any) -> tuple[Any, Any]:
        """What a layer's derivative is made of, and what goes on."""

    @abstractmethod
    def _derivative(self, weights: Any, one: Any, beside: Any, kept: Any) -> Derivative:
        """Of one layer."""

    def _gradients(self, weights: Any, one: Any, beside: Any, kept: Any, g: Any) -> tuple[Any, Any]:
        """Of a layer's weights, and of its x."""
        if self.micro == 1:
            return self._derivative(weights, one, beside, kept)(g)

        def add(total: Any, xs: Any) -> tuple[Any, Any]:
            *at_hand, g = xs
            dw, dx = self._derivative(weights, *at_hand)(g)
            return jax.tree.map(lambda t, x: t + x.astype(t.dtype), total, dw), dx

        zeros = jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), self._points(weights))
        return jax.lax.scan(add, zeros, (one, beside, kept, g))

    def _points(self, weights: Any) -> Any:
        return differentiable(_learning(self.learns, weights), self.dtype)


@dataclass(frozen=True)
class Kept(ForwardPass):
    """Of each layer there is what its policy keeps."""

    kept: list[jax.Array]  # for each layer, stacked; of several micro-batches, for each of these
    form: Any  # of one layer's derivative
    given: tuple[int | None, ...]  # for each of its leaves: which leaf of what is at hand it is

    def _begin(self) -> Any:
        return self._fetched(jnp.int32(self.layers - 1)) if self.applied.on_host else None

    def _at(self, layer: jax.Array, _: Any, ahead: Any) -> tuple[Any, Any]:
        if self.applied.on_host:  # what the layer before needs is on its way while this one computes
            return ahead, self._fetched(jnp.maximum(layer - 1, 0))
        return self._of(layer), None

    def _of(self, layer: jax.Array) -> list[jax.Array]:
        return take_layer(self.kept, layer, int(self.micro > 1))

    def _fetched(self, layer: jax.Array) -> list[jax.Array]:
        return to_device(self._of(layer))

    def _derivative(self, weights: Any, one: Any, beside: Any, kept: list[jax.Array]) -> Derivative:
        at_hand = jax.tree.leaves((self._points(weights), weights, one, beside))
        rest = iter(kept)
        leaves = [next(rest) if place is None else at_hand[place] for place in self.given]
        derivative: Derivative = jax.tree.unflatten(self.form, leaves)
        return derivative


@dataclass(frozen=True)
class Scheduled(ForwardPass):
    """Of some layers there is the boundary; the others are made again by layers that have not been updated yet."""

    plan: Schedule
    slots: Any

    def _begin(self) -> Any:
        return self.slots

    def _at(self, layer: jax.Array, weights: Any, ahead: Any) -> tuple[Any, Any]:
        run, inputs, beside, on_host = self.applied.run, self.applied.inputs, self.applied.beside, self.applied.on_host
        begin, end, slot = (jnp.asarray(x, jnp.int32)[layer] for x in (self.plan.begin, self.plan.end, self.plan.at))
        slots = made_again(run, self.plan, weights, ahead, inputs, beside, (begin, end), on_host=on_host)
        x = take_layer(slots, slot)
        return to_device(x) if on_host else x, slots

    def _derivative(self, weights: Any, one: Any, beside: Any, kept: Any) -> Derivative:
        def run(at: Any, x: Any) -> Any:
            return self.applied.run(with_gradients(weights, at), x, one, beside)[0]

        return jax.vjp(run, self._points(weights), kept)[1]


def forward(applied: StackCall, learns: Any = True, dtype: DTypeLike | None = None, micro: int = 1) -> ForwardPass:
    """The forward pass. What a layer's derivative needs of weights, inputs and what is beside is not kept again.
    `learns`: which weights have a gradient, and `dtype`: in what; None: each in its weight's own. `micro`: so many
    micro-batches, one after the other, where every boundary is kept."""
    if applied.plan is not None:
        given = applied.weights, applied.x, applied.inputs, applied.beside
        y, _, slots = first_pass(applied.run, applied.plan, *given, on_host=applied.on_host)
        return Scheduled(applied, y, dtype, learns, micro, applied.plan, slots)
    form: list[Any] = []

    def layers(batch: tuple[Any, Any, Any]) -> tuple[Any, list[jax.Array]]:
        x, inputs, beside = batch
        y, _, kept = onward(step, beside, applied.weights, x, inputs)
        return y, kept

    def step(beside: Any, one: Any, weights: Any, x: Any) -> tuple[Any, Any, list[jax.Array]]:
        at = differentiable(_learning(learns, weights), dtype)
        y, derivative = jax.vjp(lambda at, x: applied.run(with_gradients(weights, at), x, one, beside)[0], at, x)
        leaves, tree = jax.tree.flatten(derivative)
        places = {id(leaf): place for place, leaf in enumerate(jax.tree.leaves((at, weights, one, beside)))}
        given = tuple(places.get(id(leaf)) for leaf in leaves)
        form[:] = [tree, given]
        kept = [jnp.asarray(leaf) for leaf, place in zip(leaves, given, strict=True) if place is None]
        return y, beside, to_host(kept) if applied.on_host else kept

    batch = (
        split_micro_batches(applied.x, micro),
        split_micro_batches(applied.inputs, micro, 1),
        split_micro_batches(applied.beside, micro),
    )
    y, kept = layers(batch) if micro == 1 else jax.lax.map(layers, batch)
    return Kept(applied, merge_micro_batches(y, micro), dtype, learns, micro, kept, *form)


def _learning(learns: Any, weights: Any) -> Any:
    """Weights with None in the place of those that have no gradient."""
    return jax.tree.map(lambda own, w: w if own else None, learns, weights)


def merge_micro_batches(tree: Any, micro: int) -> Any:
    """Micro-batches [micro, rows, ...] as one batch: rows stay on their devices, beside others of their own."""
    over = _devices()
    if micro == 1:
        return tree

    def one(x: jax.Array) -> jax.Array:
        x = jnp.moveaxis(x.reshape(micro, over, -1, *x.shape[2:]), 0, 1)
        return x.reshape(-1, *x.shape[3:])

    return jax.tree.map(one, tree)


def split_micro_batches(tree: Any, micro: int, dim: int = 0) -> Any:
    """And back: [..., micro x rows, ...] to [micro, ..., rows, ...], where `dim` counts rows."""
    over = _devices()
    if micro == 1:
        return tree

    def one(x: jax.Array) -> jax.Array:
        before, after = x.shape[:dim], x.shape[dim + 1 :]
        x = jnp.moveaxis(x.reshape(*before, over, micro, -1, *after), dim + 1, 0)
        return x.reshape(micro, *before, -1, *after)

    return jax.tree.map(one, tree)


def _devices() -> int:
    """Over how many a batch lies."""
    layout = current()
    return 1 if layout is None else layout.parts("activations", "batch")


def take_layer(stacked: Any, layer: jax.Array, dim: int = 0) -> Any:
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, layer, dim, keepdims=False), stacked)
