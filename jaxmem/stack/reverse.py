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
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import Var
from jax.typing import DTypeLike

from jaxmem.sharding.host import take_layer
from jaxmem.sharding.layout import shard_count
from jaxmem.sharding.weights import differentiable, with_gradients
from jaxmem.stack.apply import checkpointed
from jaxmem.stack.call import Run, StackCall
from jaxmem.stack.scheduled import available_after, fetch_layer, first_pass, layer_with, recompute, scan_layers
from jaxmem.typing import Tree

# gradient of the output of a layer -> gradients of its weights and of its input
Derivative = Callable[[Tree], tuple[Tree, Tree]]

# weights of a layer -> the arrays to differentiate with respect to; None for frozen weights
ProxiesOf = Callable[[Tree], Tree]

Carry = TypeVar("Carry")  # what a visitor passes from layer to layer


@dataclass(frozen=True)
class Visitor(Generic[Carry]):
    """Receives the gradient of each layer in a backward pass."""

    begin: Carry  # the first carry
    weights: Callable[[Carry], Tree]  # carry -> the stacked weights, of which some layers are updated already
    # (carry, layer, gradient of the weights of the layer, result of `fetch`) -> carry
    visit: Callable[[Carry, jax.Array, Tree, Tree], Carry]
    # (carry, layer) -> what `visit` receives. It is called before the gradient of the layer is computed, so that the
    # copies it starts overlap with that computation.
    fetch: Callable[[Carry, jax.Array], Tree] = lambda *_: None


@dataclass(frozen=True)
class ForwardPass(ABC):
    """A stack after its forward pass."""

    call: StackCall
    proxies_of: ProxiesOf
    y: Tree
    micro: int  # number of micro-batches; rows are in the order of `merge_micro_batches`

    def backward(self, g: Tree, visitor: Visitor[Carry]) -> tuple[Carry, Tree]:
        """Returns the last carry of the visitor and the gradient of the stack's input x. `g`: that of its output.

        The loop; weights in host memory are copied one layer ahead, and `dw` is the sum over micro-batches:

            carry = visitor.begin
            for layer in reversed(range(layers)):
                weights = visitor.weights(carry)[layer]
                saved, ahead = _read(layer, ahead)  # saved by the forward pass, or recomputed
                fetched = visitor.fetch(carry, layer)
                dw, g = _gradients(weights, saved, g)
                carry = visitor.visit(carry, layer, dw, fetched)
            return carry, g
        """
        layers = self.call.layers
        rows = self.call.rows
        shared = split_micro_batches(self.call.shared, self.micro, rows)

        def step(turn: jax.Array, state: tuple[Tree, ...]) -> tuple[Tree, ...]:
            carried, g, ahead, fetched_weights = state
            layer = layers - 1 - turn
            stacked = visitor.weights(carried)
            weights = layer_with(stacked, layer, fetched_weights)
            layer_input = take_layer(self.call.inputs, layer)
            fetched_weights = fetch_layer(stacked, layer - 1)
            saved, ahead = self._read(layer, stacked, ahead)
            result = visitor.fetch(carried, layer)
            dw, dx = self._gradients(weights, split_micro_batches(layer_input, self.micro, rows), shared, saved, g)
            # Reads happen before the visitor writes; otherwise XLA would copy the old weights.
            layer, dw, dx, result = jax.lax.optimization_barrier((layer, dw, dx, result))
            return visitor.visit(carried, layer, dw, result), dx, ahead, fetched_weights

        last = fetch_layer(visitor.weights(visitor.begin), available_after(self.y, jnp.int32(layers - 1)))
        begin = visitor.begin, split_micro_batches(g, self.micro, rows), self._begin(), last
        carried, g, *_ = jax.lax.fori_loop(0, layers, step, begin)
        return carried, merge_micro_batches(g, self.micro)

    def _gradients(self, weights: Tree, layer_input: Tree, shared: Tree, saved: Tree, g: Tree) -> tuple[Tree, Tree]:
        """The gradients of the weights of a layer and of its input."""
        if self.micro == 1:
            return self._derivative(weights, layer_input, shared, saved)(g)

        def add(total: Tree, of_micro_batch: tuple[Tree, Tree, Tree, Tree]) -> tuple[Tree, Tree]:
            layer_input, shared, saved, g = of_micro_batch
            dw, dx = self._derivative(weights, layer_input, shared, saved)(g)
            return jax.tree.map(lambda t, x: t + x.astype(t.dtype), total, dw), dx

        zeros = jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), self.proxies_of(weights))
        return jax.lax.scan(add, zeros, (layer_input, shared, saved, g))

    @abstractmethod
    def _begin(self) -> Tree:
        """The first carry of `_read`."""

    @abstractmethod
    def _read(self, layer: jax.Array, weights: Tree, carry: Tree) -> tuple[Tree, Tree]:
        """(layer, stacked weights, carry) -> (what `_derivative` needs for this layer, carry)."""

    @abstractmethod
    def _derivative(self, weights: Tree, layer_input: Tree, shared: Tree, saved: Tree) -> Derivative: ...


def forward(call: StackCall, trainable: Tree = True, dtype: DTypeLike | None = None, micro: int = 1) -> ForwardPass:
    """The forward pass. Weights, inputs and `shared` are not saved again.

    Args:
        trainable: marks the weights with a gradient.
        dtype: the dtype of gradients; None: the dtype of each weight.
        micro: the number of micro-batches, which are processed one after the other; they need a policy that saves the
            input of every layer.
    """
    call = checkpointed(call, call.layers, fetches_ahead=True)
    proxies_of = differentiable_weights(trainable, dtype)
    if call.plan is None:
        return _save_residuals(call, proxies_of, micro)
    y, _, slots = first_pass(call, call.plan)
    return _SavedBoundaries(call, proxies_of, y, micro, slots)


def differentiate_layer(
    run: Run, proxies: Tree, weights: Tree, layer_input: Tree, shared: Tree, x: Tree
) -> tuple[Tree, Derivative]:
    """The output of a layer, and its derivative with respect to `proxies`, the arrays that receive the gradients of its
    weights, and its input `x`. The other arguments are those of `run`."""
    return jax.vjp(lambda proxies, x: run(with_gradients(weights, proxies), x, layer_input, shared)[0], proxies, x)


@dataclass(frozen=True)
class SavedDerivative:
    """The derivative of a layer, saved as the arrays that it needs besides weights and inputs."""

    run: Run
    proxies_of: ProxiesOf
    structure: jax.tree_util.PyTreeDef
    # For each leaf of the derivative, the index of the same array among the leaves of (proxies, weights,
    # inputs of the layer, shared inputs). None: it must be saved.
    sources: tuple[int | None, ...]

    @classmethod
    def of(
        cls, run: Run, proxies_of: ProxiesOf, example: Callable[[], tuple[Tree, Tree, Tree, Tree]]
    ) -> "SavedDerivative":
        """`example` returns arguments of a layer: its weights, x, its input, and the shared inputs."""

        def trace() -> tuple[Tree, Derivative]:
            weights, x, layer_input, shared = example()
            # Another array than `shared`, which may have the input of the first layer too.
            x = jax.lax.optimization_barrier(x)
            known = proxies_of(weights), weights, layer_input, shared
            return known, differentiate_layer(run, *known, x)[1]

        traced, (known, derivative) = jax.make_jaxpr(trace, return_shape=True)()
        count = len(jax.tree.leaves(known))
        results = traced.jaxpr.outvars
        places = {result: place for place, result in enumerate(results[:count]) if isinstance(result, Var)}
        sources = tuple(places.get(result) if isinstance(result, Var) else None for result in results[count:])
        return cls(run, proxies_of, jax.tree.structure(derivative), sources)

    def forward(self, weights: Tree, x: Tree, layer_input: Tree, shared: Tree) -> tuple[Tree, list[jax.Array]]:
        """Returns the output of the layer and the arrays to save."""
        y, derivative = differentiate_layer(self.run, self.proxies_of(weights), weights, layer_input, shared, x)
        leaves = jax.tree.leaves(derivative)
        return y, [jnp.asarray(leaf) for leaf, source in zip(leaves, self.sources, strict=True) if source is None]

    def load(self, weights: Tree, layer_input: Tree, shared: Tree, saved: list[jax.Array]) -> Derivative:
        """The derivative, from what was saved."""
        known = jax.tree.leaves((self.proxies_of(weights), weights, layer_input, shared))
        remaining = iter(saved)
        leaves = [next(remaining) if source is None else known[source] for source in self.sources]
        derivative: Derivative = jax.tree.unflatten(self.structure, leaves)
        return derivative


def differentiable_weights(trainable: Tree, dtype: DTypeLike | None) -> ProxiesOf:
    """The function of the weights of a layer. `trainable` marks the weights with a gradient."""
    return lambda weights: differentiable(
        jax.tree.map(lambda is_trainable, w: w if is_trainable else None, trainable, weights), dtype
    )


@dataclass(frozen=True)
class _SavedResiduals(ForwardPass):
    """Every layer has saved the residuals of its derivative: [layers, ...], or [micro, layers, ...]."""

    layer: SavedDerivative
    residuals: list[jax.Array]

    def _begin(self) -> Tree:
        return self._load(jnp.int32(self.call.layers - 1)) if self.call.on_host else None

    def _read(self, layer: jax.Array, _: Tree, ahead: Tree) -> tuple[Tree, Tree]:
        if self.call.on_host:  # the previous layer is copied while this one computes
            return ahead, self._load(jnp.maximum(layer - 1, 0))
        return self._load(layer), None

    def _derivative(self, weights: Tree, layer_input: Tree, shared: Tree, residuals: Tree) -> Derivative:
        return self.layer.load(weights, layer_input, shared, residuals)

    def _load(self, layer: jax.Array) -> list[jax.Array]:
        return self.call.load(take_layer(self.residuals, layer, int(self.micro > 1)))


def _save_residuals(call: StackCall, proxies_of: ProxiesOf, micro: int) -> ForwardPass:
    batch = (
        split_micro_batches(call.x, micro, call.rows),
        split_micro_batches(call.inputs, micro, call.rows, 1),
        split_micro_batches(call.shared, micro, call.rows),
    )

    def example() -> tuple[Tree, Tree, Tree, Tree]:
        first = jnp.int32(0)
        x, inputs, shared = batch if micro == 1 else take_layer(batch, first)
        return layer_with(call.weights, first, fetch_layer(call.weights, first)), x, take_layer(inputs, first), shared

    of_layer = SavedDerivative.of(call.run, proxies_of, example)

    def step(shared: Tree, layer_input: Tree, weights: Tree, x: Tree) -> tuple[Tree, Tree, list[jax.Array]]:
        y, saved = of_layer.forward(weights, x, layer_input, shared)
        return y, shared, call.save(saved)

    def layers(batch: tuple[Tree, Tree, Tree]) -> tuple[Tree, list[jax.Array]]:
        x, inputs, shared = batch
        y, _, saved = scan_layers(step, shared, call.weights, x, inputs)
        return y, saved

    y, saved = layers(batch) if micro == 1 else jax.lax.map(layers, batch)
    return _SavedResiduals(call, proxies_of, merge_micro_batches(y, micro), micro, of_layer, saved)


@dataclass(frozen=True)
class _SavedBoundaries(ForwardPass):
    """Some layers have saved their input; that of the others is recomputed by running earlier layers, which have not
    been updated yet."""

    slots: Tree

    def _begin(self) -> Tree:
        return self.slots

    def _read(self, layer: jax.Array, weights: Tree, slots: Tree) -> tuple[Tree, Tree]:
        assert self.call.plan is not None
        slots = recompute(replace(self.call, weights=weights), slots, layer)
        backward_slots = jnp.asarray(self.call.plan.backward_slots, jnp.int32)
        return self.call.load_boundary(take_layer(slots, backward_slots[layer])), slots

    def _derivative(self, weights: Tree, layer_input: Tree, shared: Tree, x: Tree) -> Derivative:
        return differentiate_layer(self.call.run, self.proxies_of(weights), weights, layer_input, shared, x)[1]


def merge_micro_batches(tree: Tree, micro: int) -> Tree:
    """Micro-batches [micro, rows, ...] as one batch, in an order in which no row changes its device."""
    over = shard_count("activations", "batch")
    if micro == 1:
        return tree

    def merge(x: jax.Array) -> jax.Array:
        x = jnp.moveaxis(x.reshape(micro, over, -1, *x.shape[2:]), 0, 1)
        return x.reshape(-1, *x.shape[3:])

    return jax.tree.map(merge, tree)


def split_micro_batches(tree: Tree, micro: int, rows: int, dim: int = 0) -> Tree:
    """The inverse: [..., micro x rows, ...] to [micro, ..., rows, ...]; `dim` is the dimension of rows. An array in
    which it is not of size `rows`, that of all micro-batches, is the same for all rows and is repeated."""
    over = shard_count("activations", "batch")
    if micro == 1:
        return tree

    def split(x: jax.Array) -> jax.Array:
        if x.shape[dim : dim + 1] != (rows,):
            return jnp.broadcast_to(x, (micro, *x.shape))
        before = x.shape[:dim]
        after = x.shape[dim + 1 :]
        x = jnp.moveaxis(x.reshape(*before, over, micro, -1, *after), dim + 1, 0)
        return x.reshape(micro, *before, -1, *after)

    return jax.tree.map(split, tree)
