"""Forward and backward pass of a stack in which the gradient of each layer is used before the next one is computed.

The backward pass of jax returns the gradients of all layers at the end. Here `forward` saves the activations that the
recompute policy needs, and `backward` goes through the layers from the last to the first and passes each gradient to a
visitor. The visitor may update the weights of that layer, since they are not needed any more. With N layers and W bytes
of gradients per layer this takes W bytes instead of N W, without additional FLOPs (Lv et al., arXiv:2306.09782).

With several micro-batches, the gradient of a layer is computed for all of them, and the visitor receives the float32
sum. Activations are saved for all micro-batches; the intermediates of a layer exist for one micro-batch at a time.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxmem.sharding import current
from jaxmem.sharding.host import fetch_layer, take_layer, to_device, to_host
from jaxmem.sharding.weights import differentiable, with_gradients
from jaxmem.stack.apply import StackCall
from jaxmem.stack.schedule import Schedule
from jaxmem.stack.scheduled import first_pass, layer_with, recompute, scan_layers

# (carry, layer, gradient of its weights, result of `fetch`) -> carry
Visit = Callable[[Any, jax.Array, Any, Any], Any]
Derivative = Callable[
    [Any], tuple[Any, Any]
]  # gradient of the output of a layer -> gradients of its weights and of its input
Fetch = Callable[[Any, jax.Array], Any]  # (carry, layer)


@dataclass(frozen=True)
class ForwardPass(ABC):
    """A stack after its forward pass."""

    applied: StackCall
    y: Any
    dtype: DTypeLike | None  # of gradients; None: the dtype of each weight
    trainable: Any  # whether weights have a gradient: for each weight, or for all
    micro: int  # number of micro-batches; rows are in the order of `merge_micro_batches`

    @property
    def layers(self) -> int:
        count: int = jax.tree.leaves(self.applied.weights)[0].shape[0]
        return count

    def backward(
        self, g: Any, weights: Callable[[Any], Any], visit: Visit, carried: Any, fetch: Fetch = lambda *_: None
    ) -> tuple[Any, Any]:
        """Returns the last carry and the gradient of the stack's input x. `weights` returns the stacked weights in a
        carry. `fetch` is called before the gradient of a layer is computed, so that the copies it starts overlap with
        that computation."""
        beside = split_micro_batches(self.applied.beside, self.micro)

        def step(turn: jax.Array, state: tuple[Any, ...]) -> tuple[Any, ...]:
            carried, g, ahead, fetched = state
            layer = self.layers - 1 - turn
            stacked = weights(carried)
            own, one = layer_with(stacked, layer, fetched), take_layer(self.applied.inputs, layer)
            fetched = fetch_layer(stacked, layer - 1)
            saved, ahead = self._at(layer, stacked, ahead)
            beside_layer = fetch(carried, layer)
            dw, dx = self._gradients(own, split_micro_batches(one, self.micro), beside, saved, g)
            # Reads happen before the visitor writes; otherwise XLA would copy the old weights.
            layer, dw, dx, beside_layer = jax.lax.optimization_barrier((layer, dw, dx, beside_layer))
            return visit(carried, layer, dw, beside_layer), dx, ahead, fetched

        last = fetch_layer(weights(carried), jnp.int32(self.layers - 1))
        begin = carried, split_micro_batches(g, self.micro), self._begin(), last
        carried, g, *_ = jax.lax.fori_loop(0, self.layers, step, begin)
        return carried, merge_micro_batches(g, self.micro)

    @abstractmethod
    def _begin(self) -> Any:
        """The carry from layer to layer, in addition to the gradient."""

    @abstractmethod
    def _at(self, layer: jax.Array, weights: Any, ahead: Any) -> tuple[Any, Any]:
        """The residuals of the derivative of a layer, and the new carry."""

    @abstractmethod
    def _derivative(self, weights: Any, one: Any, beside: Any, saved: Any) -> Derivative:
        """The derivative of one layer."""

    def _gradients(self, weights: Any, one: Any, beside: Any, saved: Any, g: Any) -> tuple[Any, Any]:
        """The gradients of the weights of a layer and of its input."""
        if self.micro == 1:
            return self._derivative(weights, one, beside, saved)(g)

        def add(total: Any, xs: Any) -> tuple[Any, Any]:
            *at_hand, g = xs
            dw, dx = self._derivative(weights, *at_hand)(g)
            return jax.tree.map(lambda t, x: t + x.astype(t.dtype), total, dw), dx

        zeros = jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), self._differentiable(weights))
        return jax.lax.scan(add, zeros, (one, beside, saved, g))

    def _differentiable(self, weights: Any) -> Any:
        return differentiable(_select(self.trainable, weights), self.dtype)


@dataclass(frozen=True)
class SavedPass(ForwardPass):
    """A forward pass in which every layer saved its own residuals."""

    saved: list[jax.Array]  # of each layer, stacked; with micro-batches, of each of them
    treedef: Any  # of the derivative of one layer
    sources: tuple[
        int | None, ...
    ]  # for each leaf, the index of the same leaf in (weights, input, beside); None: saved

    def _begin(self) -> Any:
        return self._fetched(jnp.int32(self.layers - 1)) if self.applied.on_host else None

    def _at(self, layer: jax.Array, _: Any, ahead: Any) -> tuple[Any, Any]:
        if self.applied.on_host:  # the previous layer is copied while this one computes
            return ahead, self._fetched(jnp.maximum(layer - 1, 0))
        return self._of(layer), None

    def _of(self, layer: jax.Array) -> list[jax.Array]:
        return take_layer(self.saved, layer, int(self.micro > 1))

    def _fetched(self, layer: jax.Array) -> list[jax.Array]:
        return to_device(self._of(layer))

    def _derivative(self, weights: Any, one: Any, beside: Any, saved: list[jax.Array]) -> Derivative:
        at_hand = jax.tree.leaves((self._differentiable(weights), weights, one, beside))
        rest = iter(saved)
        leaves = [next(rest) if place is None else at_hand[place] for place in self.sources]
        derivative: Derivative = jax.tree.unflatten(self.treedef, leaves)
        return derivative


@dataclass(frozen=True)
class ScheduledPass(ForwardPass):
    """Some layers have a saved boundary; the others are recomputed by running earlier layers, which have not been
    updated yet."""

    plan: Schedule
    slots: Any

    def _begin(self) -> Any:
        return self.slots

    def _at(self, layer: jax.Array, weights: Any, ahead: Any) -> tuple[Any, Any]:
        run, inputs, beside, on_host = self.applied.run, self.applied.inputs, self.applied.beside, self.applied.on_host
        begin, end, slot = (jnp.asarray(x, jnp.int32)[layer] for x in (self.plan.begin, self.plan.end, self.plan.at))
        slots = recompute(run, self.plan, weights, ahead, inputs, beside, (begin, end), on_host=on_host)
        x = take_layer(slots, slot)
        return to_device(x) if on_host else x, slots

    def _derivative(self, weights: Any, one: Any, beside: Any, saved: Any) -> Derivative:
        def run(at: Any, x: Any) -> Any:
            return self.applied.run(with_gradients(weights, at), x, one, beside)[0]

        return jax.vjp(run, self._differentiable(weights), saved)[1]


def forward(applied: StackCall, trainable: Any = True, dtype: DTypeLike | None = None, micro: int = 1) -> ForwardPass:
    """The forward pass. Weights, inputs and `beside` are not saved again. `trainable` marks the weights with a
    gradient. `dtype` is the dtype of gradients; None is the dtype of each weight. `micro` is the number of
    micro-batches, which are processed one after the other; they need a policy that saves every boundary."""
    if applied.plan is not None:
        given = applied.weights, applied.x, applied.inputs, applied.beside
        y, _, slots = first_pass(applied.run, applied.plan, *given, on_host=applied.on_host)
        return ScheduledPass(applied, y, dtype, trainable, micro, applied.plan, slots)
    derivative_form: list[Any] = []

    def layers(batch: tuple[Any, Any, Any]) -> tuple[Any, list[jax.Array]]:
        x, inputs, beside = batch
        y, _, saved = scan_layers(step, beside, applied.weights, x, inputs)
        return y, saved

    def step(beside: Any, one: Any, weights: Any, x: Any) -> tuple[Any, Any, list[jax.Array]]:
        at = differentiable(_select(trainable, weights), dtype)
        y, derivative = jax.vjp(lambda at, x: applied.run(with_gradients(weights, at), x, one, beside)[0], at, x)
        leaves, tree = jax.tree.flatten(derivative)
        places = {id(leaf): place for place, leaf in enumerate(jax.tree.leaves((at, weights, one, beside)))}
        given = tuple(places.get(id(leaf)) for leaf in leaves)
        derivative_form[:] = [tree, given]
        saved = [jnp.asarray(leaf) for leaf, place in zip(leaves, given, strict=True) if place is None]
        return y, beside, to_host(saved) if applied.on_host else saved

    batch = (
        split_micro_batches(applied.x, micro),
        split_micro_batches(applied.inputs, micro, 1),
        split_micro_batches(applied.beside, micro),
    )
    y, saved = layers(batch) if micro == 1 else jax.lax.map(layers, batch)
    return SavedPass(applied, merge_micro_batches(y, micro), dtype, trainable, micro, saved, *derivative_form)


def _select(trainable: Any, weights: Any) -> Any:
    """The weights, with None for frozen ones."""
    return jax.tree.map(lambda own, w: w if own else None, trainable, weights)


def merge_micro_batches(tree: Any, micro: int) -> Any:
    """Micro-batches [micro, rows, ...] as one batch, in an order in which no row changes its device."""
    over = _devices()
    if micro == 1:
        return tree

    def one(x: jax.Array) -> jax.Array:
        x = jnp.moveaxis(x.reshape(micro, over, -1, *x.shape[2:]), 0, 1)
        return x.reshape(-1, *x.shape[3:])

    return jax.tree.map(one, tree)


def split_micro_batches(tree: Any, micro: int, dim: int = 0) -> Any:
    """The inverse: [..., micro x rows, ...] to [micro, ..., rows, ...]; `dim` is the dimension of rows."""
    over = _devices()
    if micro == 1:
        return tree

    def one(x: jax.Array) -> jax.Array:
        before, after = x.shape[:dim], x.shape[dim + 1 :]
        x = jnp.moveaxis(x.reshape(*before, over, micro, -1, *after), dim + 1, 0)
        return x.reshape(micro, *before, -1, *after)

    return jax.tree.map(one, tree)


def _devices() -> int:
    """The number of devices that a batch is sharded over."""
    layout = current()
    return 1 if layout is None else layout.parts("activations", "batch")
