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
from functools import partial

import jax
import jax.numpy as jnp
from jax.extend.core import Var
from jax.typing import DTypeLike

from jaxmem.sharding import shard_count
from jaxmem.sharding.host import take_layer
from jaxmem.sharding.weights import differentiable, with_gradients
from jaxmem.stack.apply import checkpointed
from jaxmem.stack.call import Run, StackCall
from jaxmem.stack.recompute_plan import RecomputePlan
from jaxmem.stack.scheduled import available_after, fetch_layer, first_pass, layer_with, recompute, scan_layers
from jaxmem.typing import Tree

# (carry, layer, gradient of its weights, result of `fetch`) -> carry
Visit = Callable[[Tree, jax.Array, Tree, Tree], Tree]
# gradient of the output of a layer -> gradients of its weights and of its input
Derivative = Callable[[Tree], tuple[Tree, Tree]]


@dataclass(frozen=True)
class Visitor:
    """Receives the gradient of each layer in a backward pass."""

    begin: Tree  # the first carry
    weights: Callable[[Tree], Tree]  # carry -> the stacked weights
    visit: Visit
    # (carry, layer) -> what `visit` receives. It is called before the gradient of the layer is computed, so that the
    # copies it starts overlap with that computation.
    fetch: Callable[[Tree, jax.Array], Tree] = lambda *_: None


@dataclass(frozen=True)
class ForwardPass:
    """A stack after its forward pass."""

    call: StackCall
    y: Tree
    micro: int  # number of micro-batches; rows are in the order of `merge_micro_batches`
    proxies_of: Callable[[Tree], Tree]  # weights of a layer -> the arrays to differentiate with respect to
    # (layer, stacked weights, carry) -> (residuals of the derivative of this layer, carry)
    residuals: Callable[[jax.Array, Tree, Tree], tuple[Tree, Tree]]
    begin: Callable[[], Tree]  # returns the first carry of `residuals`
    # (proxies, weights of a layer, its input, shared inputs, residuals) -> the derivative of the layer
    derivative: Callable[[Tree, Tree, Tree, Tree, Tree], Derivative]

    @property
    def layers(self) -> int:
        return self.call.layers

    def backward(self, g: Tree, visitor: Visitor) -> tuple[Tree, Tree]:
        """Returns the last carry of the visitor and the gradient of the stack's input x."""
        shared = split_micro_batches(self.call.shared, self.micro)

        def step(turn: jax.Array, state: tuple[Tree, ...]) -> tuple[Tree, ...]:
            carried, g, ahead, fetched = state
            layer = self.layers - 1 - turn
            stacked = visitor.weights(carried)
            weights = layer_with(stacked, layer, fetched)
            layer_input = take_layer(self.call.inputs, layer)
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

    def _gradients(self, weights: Tree, layer_input: Tree, shared: Tree, saved: Tree, g: Tree) -> tuple[Tree, Tree]:
        """The gradients of the weights of a layer and of its input."""
        if self.micro == 1:
            return self.derivative(self.proxies_of(weights), weights, layer_input, shared, saved)(g)

        def add(total: Tree, of_micro_batch: tuple[Tree, Tree, Tree, Tree]) -> tuple[Tree, Tree]:
            layer_input, shared, saved, g = of_micro_batch
            dw, dx = self.derivative(self.proxies_of(weights), weights, layer_input, shared, saved)(g)
            return jax.tree.map(lambda t, x: t + x.astype(t.dtype), total, dw), dx

        zeros = jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), self.proxies_of(weights))
        return jax.lax.scan(add, zeros, (layer_input, shared, saved, g))


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
    return _saving(call, proxies_of, micro) if call.plan is None else _recomputing(call, call.plan, proxies_of, micro)


def layer_derivative(run: Run, proxies: Tree, weights: Tree, layer_input: Tree, shared: Tree, x: Tree) -> Derivative:
    """The derivative of a layer with respect to `proxies`, the arrays that receive the gradients of its weights, and
    its input `x`. The other arguments are those of `run`."""
    return jax.vjp(lambda proxies, x: run(with_gradients(weights, proxies), x, layer_input, shared)[0], proxies, x)[1]


@dataclass(frozen=True)
class SavedDerivative:
    """The derivative of a layer, saved as the arrays that it needs besides weights and inputs."""

    run: Run
    proxies_of: Callable[[Tree], Tree]  # weights of a layer -> the arrays to differentiate with respect to
    structure: jax.tree_util.PyTreeDef
    # For each leaf of the derivative, the index of the same array among the leaves of (proxies, weights,
    # inputs of the layer, shared inputs). None: it must be saved.
    sources: tuple[int | None, ...]

    @classmethod
    def of(
        cls, run: Run, proxies_of: Callable[[Tree], Tree], example: Callable[[], tuple[Tree, Tree, Tree, Tree]]
    ) -> "SavedDerivative":
        """`example` returns arguments of a layer: its weights, x, its input, and the shared inputs."""

        def trace() -> tuple[Tree, Derivative]:
            weights, x, layer_input, shared = example()
            known = proxies_of(weights), weights, layer_input, shared
            return known, layer_derivative(run, *known, x)

        traced, (known, derivative) = jax.make_jaxpr(trace, return_shape=True)()
        count = len(jax.tree.leaves(known))
        results = traced.jaxpr.outvars
        places = {result: place for place, result in enumerate(results[:count]) if isinstance(result, Var)}
        sources = tuple(places.get(result) if isinstance(result, Var) else None for result in results[count:])
        return cls(run, proxies_of, jax.tree.structure(derivative), sources)

    def forward(self, weights: Tree, x: Tree, layer_input: Tree, shared: Tree) -> tuple[Tree, list[jax.Array]]:
        """Returns the output of the layer and the arrays to save."""
        run = lambda proxies, x: self.run(with_gradients(weights, proxies), x, layer_input, shared)[0]  # noqa: E731
        y, derivative = jax.vjp(run, self.proxies_of(weights), x)
        leaves = jax.tree.leaves(derivative)
        return y, [jnp.asarray(leaf) for leaf, source in zip(leaves, self.sources, strict=True) if source is None]

    def load(self, proxies: Tree, weights: Tree, layer_input: Tree, shared: Tree, saved: list[jax.Array]) -> Derivative:
        """The derivative, from what was saved."""
        known = jax.tree.leaves((proxies, weights, layer_input, shared))
        remaining = iter(saved)
        leaves = [next(remaining) if source is None else known[source] for source in self.sources]
        derivative: Derivative = jax.tree.unflatten(self.structure, leaves)
        return derivative


def differentiable_weights(trainable: Tree, dtype: DTypeLike | None) -> Callable[[Tree], Tree]:
    """A function: weights of a layer -> the arrays to differentiate with respect to; None for frozen weights."""
    return lambda weights: differentiable(
        jax.tree.map(lambda is_trainable, w: w if is_trainable else None, trainable, weights), dtype
    )


def _saving(call: StackCall, proxies_of: Callable[[Tree], Tree], micro: int) -> ForwardPass:
    """Every layer saves the residuals of its derivative."""
    batch = (
        split_micro_batches(call.x, micro),
        split_micro_batches(call.inputs, micro, 1),
        split_micro_batches(call.shared, micro),
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

    y, every = layers(batch) if micro == 1 else jax.lax.map(layers, batch)

    def load(layer: jax.Array) -> list[jax.Array]:
        return call.load(take_layer(every, layer, int(micro > 1)))

    def residuals(layer: jax.Array, _: Tree, ahead: Tree) -> tuple[Tree, Tree]:
        if call.on_host:  # the previous layer is copied while this one computes
            return ahead, load(jnp.maximum(layer - 1, 0))
        return load(layer), None

    def begin() -> Tree:
        return load(jnp.int32(call.layers - 1)) if call.on_host else None

    return ForwardPass(call, merge_micro_batches(y, micro), micro, proxies_of, residuals, begin, of_layer.load)


def _recomputing(call: StackCall, plan: RecomputePlan, proxies_of: Callable[[Tree], Tree], micro: int) -> ForwardPass:
    """Some layers save their input; that of the others is recomputed by running earlier layers, which have not been
    updated yet."""
    y, _, slots = first_pass(call, plan)

    def residuals(layer: jax.Array, weights: Tree, slots: Tree) -> tuple[Tree, Tree]:
        slots = recompute(replace(call, weights=weights), slots, layer)
        return call.load_boundary(take_layer(slots, jnp.asarray(plan.backward_slots, jnp.int32)[layer])), slots

    return ForwardPass(call, y, micro, proxies_of, residuals, lambda: slots, partial(layer_derivative, call.run))


def merge_micro_batches(tree: Tree, micro: int) -> Tree:
    """Micro-batches [micro, rows, ...] as one batch, in an order in which no row changes its device."""
    over = shard_count("activations", "batch")
    if micro == 1:
        return tree

    def merge(x: jax.Array) -> jax.Array:
        x = jnp.moveaxis(x.reshape(micro, over, -1, *x.shape[2:]), 0, 1)
        return x.reshape(-1, *x.shape[3:])

    return jax.tree.map(merge, tree)


def split_micro_batches(tree: Tree, micro: int, dim: int = 0) -> Tree:
    """The inverse: [..., micro x rows, ...] to [micro, ..., rows, ...]; `dim` is the dimension of rows. Arrays
    without rows are repeated."""
    over = shard_count("activations", "batch")
    if micro == 1:
        return tree

    def split(x: jax.Array) -> jax.Array:
        if x.ndim <= dim:  # x is the same for all rows
            return jnp.broadcast_to(x, (micro, *x.shape))
        before = x.shape[:dim]
        after = x.shape[dim + 1 :]
        x = jnp.moveaxis(x.reshape(*before, over, micro, -1, *after), dim + 1, 0)
        return x.reshape(micro, *before, -1, *after)

    return jax.tree.map(split, tree)
