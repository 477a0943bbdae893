"""Forward and backward pass of a stack in which the gradient of each layer is used before the next one is computed.

The backward pass of jax returns the gradients of all layers at the end. Here `forward` saves the activations that the
recompute policy needs, and `backward` goes through the layers from the last to the first and passes each gradient to a
visitor. The visitor may update the weights of that layer, since they are not needed any more. With N layers and W bytes
of gradients per layer this takes W bytes instead of N W, without additional FLOPs (Lv et al., arXiv:2306.09782).

With several micro-batches, the gradient of a layer is computed for all of them, and the visitor receives the float32
sum. Activations are saved for all micro-batches; the intermediates of a layer exist for one micro-batch at a time.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxmem.sharding import shard_count
from jaxmem.sharding.host import take_layer
from jaxmem.sharding.weights import differentiable, with_gradients
from jaxmem.stack.interception import Run, StackCall
from jaxmem.stack.schedule import Schedule
from jaxmem.stack.scheduled import available_after, fetch_layer, first_pass, layer_with, recompute, scan_layers

# (carry, layer, gradient of its weights, result of `fetch`) -> carry
Visit = Callable[[Any, jax.Array, Any, Any], Any]
# gradient of the output of a layer -> gradients of its weights and of its input
Derivative = Callable[[Any], tuple[Any, Any]]


@dataclass(frozen=True)
class Visitor:
    """Receives the gradient of each layer in a backward pass."""

    begin: Any  # the first carry
    weights: Callable[[Any], Any]  # carry -> the stacked weights
    visit: Visit
    # (carry, layer) -> what `visit` receives. It is called before the gradient of the layer is computed, so that the
    # copies it starts overlap with that computation.
    fetch: Callable[[Any, jax.Array], Any] = lambda *_: None


@dataclass(frozen=True)
class ForwardPass:
    """A stack after its forward pass."""

    applied: StackCall
    y: Any
    micro: int  # number of micro-batches; rows are in the order of `merge_micro_batches`
    differentiable: Callable[[Any], Any]  # weights of a layer -> the arrays to differentiate with respect to
    # (layer, stacked weights, carry) -> (residuals of the derivative of this layer, carry)
    residuals: Callable[[jax.Array, Any, Any], tuple[Any, Any]]
    begin: Callable[[], Any]  # returns the first carry of `residuals`
    # (differentiable arrays, weights of a layer, its input, shared inputs, residuals) -> the derivative of the layer
    derivative: Callable[[Any, Any, Any, Any, Any], Derivative]

    @property
    def layers(self) -> int:
        return self.applied.layers

    def backward(self, g: Any, visitor: Visitor) -> tuple[Any, Any]:
        """Returns the last carry of the visitor and the gradient of the stack's input x."""
        shared = split_micro_batches(self.applied.shared, self.micro)

        def step(turn: jax.Array, state: tuple[Any, ...]) -> tuple[Any, ...]:
            carried, g, ahead, fetched = state
            layer = self.layers - 1 - turn
            stacked = visitor.weights(carried)
            weights = layer_with(stacked, layer, fetched)
            layer_input = take_layer(self.applied.inputs, layer)
            fetched = fetch_layer(stacked, layer - 1)
            saved, ahead = self.residuals(layer, stacked, ahead)
            result = visitor.fetch(carried, layer)
            dw, dx = self._gradients(weights, split_micro_batches(layer_input, self.micro), shared, saved, g)
            # Reads happen before the visitor writes; otherwise XLA would copy the old weights.
            layer, dw, dx, result = jax.lax.optimization_barrier((layer, dw, dx, result))
            return visitor.visit(carried, layer, dw, result), dx, ahead, fetched

        last = fetch_layer(visitor.weights(visitor.begin), available_after(self.y, jnp.int32(self.layers - 1)))
        begin = visitor.begin, split_micro_batches(g, self.micro), self.begin(), last
        carried, g, *_ = jax.lax.fori_loop(0, self.layers, step, begin)
        return carried, merge_micro_batches(g, self.micro)

    def _gradients(self, weights: Any, layer_input: Any, shared: Any, saved: Any, g: Any) -> tuple[Any, Any]:
        """The gradients of the weights of a layer and of its input."""
        if self.micro == 1:
            return self.derivative(self.differentiable(weights), weights, layer_input, shared, saved)(g)

        def add(total: Any, xs: Any) -> tuple[Any, Any]:
            *residuals, g = xs
            dw, dx = self.derivative(self.differentiable(weights), weights, *residuals)(g)
            return jax.tree.map(lambda t, x: t + x.astype(t.dtype), total, dw), dx

        zeros = jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), self.differentiable(weights))
        return jax.lax.scan(add, zeros, (layer_input, shared, saved, g))


def forward(applied: StackCall, trainable: Any = True, dtype: DTypeLike | None = None, micro: int = 1) -> ForwardPass:
    """The forward pass. Weights, inputs and `shared` are not saved again. `trainable` marks the weights with a
    gradient. `dtype` is the dtype of gradients; None is the dtype of each weight. `micro` is the number of
    micro-batches, which are processed one after the other; they need a policy that saves the input of every layer."""

    at = differentiable_weights(trainable, dtype)
    return _saving(applied, at, micro) if applied.plan is None else _recomputing(applied, applied.plan, at, micro)


class LayerDerivative:
    """The derivative of a layer, as the arrays that it needs besides weights and inputs. `forward` is traced first."""

    def __init__(self, run: Run, at: Callable[[Any], Any]) -> None:
        self._run, self._at = run, at
        self._tree: Any = None
        # For each leaf of the derivative, the index of the same array among the leaves of (differentiable arrays,
        # weights, inputs of the layer, shared inputs). None: it must be saved.
        self._sources: list[int | None] = []

    def forward(self, weights: Any, x: Any, layer_input: Any, shared: Any) -> tuple[Any, list[jax.Array]]:
        """Returns the output of the layer and the arrays to save."""
        at = self._at(weights)
        y, derivative = jax.vjp(lambda at, x: self._run(with_gradients(weights, at), x, layer_input, shared)[0], at, x)
        leaves, self._tree = jax.tree.flatten(derivative)
        places = {id(leaf): place for place, leaf in enumerate(jax.tree.leaves((at, weights, layer_input, shared)))}
        self._sources = [places.get(id(leaf)) for leaf in leaves]
        return y, [jnp.asarray(leaf) for leaf, place in zip(leaves, self._sources, strict=True) if place is None]

    def from_saved(self, at: Any, weights: Any, layer_input: Any, shared: Any, saved: list[jax.Array]) -> Derivative:
        """The derivative, from what was saved. `at`: the arrays to differentiate with respect to."""
        known = jax.tree.leaves((at, weights, layer_input, shared))
        remaining = iter(saved)
        leaves = [next(remaining) if place is None else known[place] for place in self._sources]
        derivative: Derivative = jax.tree.unflatten(self._tree, leaves)
        return derivative

    def recomputed(self, at: Any, weights: Any, layer_input: Any, shared: Any, x: Any) -> Derivative:
        """The derivative, from the input of the layer."""

        def run(at: Any, x: Any) -> Any:
            return self._run(with_gradients(weights, at), x, layer_input, shared)[0]

        return jax.vjp(run, at, x)[1]


def differentiable_weights(trainable: Any, dtype: DTypeLike | None) -> Callable[[Any], Any]:
    """A function: weights of a layer -> the arrays to differentiate with respect to; None for frozen weights."""
    return lambda weights: differentiable(
        jax.tree.map(lambda is_trainable, w: w if is_trainable else None, trainable, weights), dtype
    )


def _saving(applied: StackCall, at: Callable[[Any], Any], micro: int) -> ForwardPass:
    """Every layer saves the residuals of its derivative."""
    of_layer = LayerDerivative(applied.run, at)

    def step(shared: Any, layer_input: Any, weights: Any, x: Any) -> tuple[Any, Any, list[jax.Array]]:
        y, saved = of_layer.forward(weights, x, layer_input, shared)
        return y, shared, applied.save(saved)

    def layers(batch: tuple[Any, Any, Any]) -> tuple[Any, list[jax.Array]]:
        x, inputs, shared = batch
        y, _, saved = scan_layers(step, shared, applied.weights, x, inputs)
        return y, saved

    batch = (
        split_micro_batches(applied.x, micro),
        split_micro_batches(applied.inputs, micro, 1),
        split_micro_batches(applied.shared, micro),
    )
    y, every = layers(batch) if micro == 1 else jax.lax.map(layers, batch)

    def load(layer: jax.Array) -> list[jax.Array]:
        return applied.load(take_layer(every, layer, int(micro > 1)))

    def residuals(layer: jax.Array, _: Any, ahead: Any) -> tuple[Any, Any]:
        if applied.on_host:  # the previous layer is copied while this one computes
            return ahead, load(jnp.maximum(layer - 1, 0))
        return load(layer), None

    def begin() -> Any:
        return load(jnp.int32(applied.layers - 1)) if applied.on_host else None

    return ForwardPass(applied, merge_micro_batches(y, micro), micro, at, residuals, begin, of_layer.from_saved)


def _recomputing(applied: StackCall, plan: Schedule, at: Callable[[Any], Any], micro: int) -> ForwardPass:
    """Some layers save their input; that of the others is recomputed by running earlier layers, which have not been
    updated yet."""
    y, _, slots = first_pass(applied, plan)

    def residuals(layer: jax.Array, weights: Any, slots: Any) -> tuple[Any, Any]:
        slots = recompute(replace(applied, weights=weights), slots, layer)
        return applied.load(take_layer(slots, jnp.asarray(plan.at, jnp.int32)[layer])), slots

    of_layer = LayerDerivative(applied.run, at)
    return ForwardPass(applied, y, micro, at, residuals, lambda: slots, of_layer.recomputed)


def merge_micro_batches(tree: Any, micro: int) -> Any:
    """Micro-batches [micro, rows, ...] as one batch, in an order in which no row changes its device."""
    over = shard_count("activations", "batch")
    if micro == 1:
        return tree

    def merge(x: jax.Array) -> jax.Array:
        x = jnp.moveaxis(x.reshape(micro, over, -1, *x.shape[2:]), 0, 1)
        return x.reshape(-1, *x.shape[3:])

    return jax.tree.map(merge, tree)


def split_micro_batches(tree: Any, micro: int, dim: int = 0) -> Any:
    """The inverse: [..., micro x rows, ...] to [micro, ..., rows, ...]; `dim` is the dimension of rows. Arrays
    without rows are repeated."""
    over = shard_count("activations", "batch")
    if micro == 1:
        return tree

    def split(x: jax.Array) -> jax.Array:
        before, after = x.shape[:dim], x.shape[dim + 1 :]
        if x.ndim <= dim:  # x is the same for all rows
            return jnp.broadcast_to(x, (micro, *x.shape))
        x = jnp.moveaxis(x.reshape(*before, over, micro, -1, *after), dim + 1, 0)
        return x.reshape(micro, *before, -1, *after)

    return jax.tree.map(split, tree)
