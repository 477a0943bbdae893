"""A stack's two passes with the layers in sight: what happens to a layer's gradient is said before the next is made.

jax's own backward pass gives the gradients of all layers at the end. Here `forward` keeps of each layer what its
recomputation policy says, and `backward` goes through the layers from the last to the first and hands each gradient
to a visitor, who may change that layer's weights: they are needed no more. N layers of W bytes of gradients: W bytes
in place of N W, and no operation more (Lv et al., arXiv:2306.09782).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxmem.stack.apply import Applied
from jaxmem.stack.host import to_device, to_host
from jaxmem.weights import placed, points

# (what is carried, layer, the gradient of its weights, what was made ready for it) -> what is carried
Visit = Callable[[Any, jax.Array, Any, Any], Any]
Ready = Callable[[Any, jax.Array], Any]  # (what is carried, layer)


@dataclass(frozen=True)
class Passed:
    """A stack after its forward pass."""

    applied: Applied
    y: Any
    kept: list[jax.Array]  # for each layer, stacked
    form: Any  # of one layer's derivative
    given: tuple[int | None, ...]  # for each of its leaves: which leaf of what is at hand it is
    dtype: DTypeLike | None  # of gradients; None: each in its weight's own

    def backward(
        self, g: Any, weights: Callable[[Any], Any], visit: Visit, carried: Any, ready: Ready = lambda *_: None
    ) -> tuple[Any, Any]:
        """What is carried in the end, and the gradient of the stack's x. `weights` finds the stacked weights in what
        is carried; `ready` is asked before a layer's gradient is made, and what it brings may come meanwhile."""
        layers = jax.tree.leaves(self.applied.weights)[0].shape[0]

        def step(turn: jax.Array, state: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
            carried, g, ahead = state
            layer = layers - 1 - turn
            own, one, kept = layer_of((weights(carried), self.applied.inputs, self.kept), layer)
            if self.applied.on_host:  # what the layer before needs is on its way while this one computes
                kept, ahead = ahead, self._fetched(jnp.maximum(layer - 1, 0))
            brought = ready(carried, layer)
            dw, dx = self._derivative(own, one, kept)(g)
            # Before a visitor writes what it read: or XLA would keep, or copy, what weights were until all is done.
            layer, dw, dx, brought = jax.lax.optimization_barrier((layer, dw, dx, brought))
            return visit(carried, layer, dw, brought), dx, ahead

        ahead = self._fetched(jnp.int32(layers - 1)) if self.applied.on_host else None
        return jax.lax.fori_loop(0, layers, step, (carried, g, ahead))[:2]

    def _fetched(self, layer: jax.Array) -> list[jax.Array]:
        return to_device(layer_of(self.kept, layer))

    def _derivative(self, weights: Any, one: Any, kept: list[jax.Array]) -> Callable[[Any], tuple[Any, Any]]:
        at_hand = jax.tree.leaves((points(weights, self.dtype), weights, one, self.applied.beside))
        rest = iter(kept)
        return jax.tree.unflatten(self.form, [next(rest) if place is None else at_hand[place] for place in self.given])


def forward(applied: Applied, dtype: DTypeLike | None = None) -> Passed:
    """The forward pass. What a layer's derivative needs of weights, inputs and what is beside is not kept again.
    `dtype`: of gradients; None: each in its weight's own."""
    form: list[Any] = []

    def step(carried: tuple[Any, Any], xs: tuple[Any, Any]) -> tuple[tuple[Any, Any], list[jax.Array]]:
        (x, beside), (weights, one) = carried, xs
        at = points(weights, dtype)
        y, derivative = jax.vjp(lambda at, x: applied.run(placed(weights, at), x, one, beside)[0], at, x)
        leaves, tree = jax.tree.flatten(derivative)
        places = {id(leaf): place for place, leaf in enumerate(jax.tree.leaves((at, weights, one, beside)))}
        given = tuple(places.get(id(leaf)) for leaf in leaves)
        form[:] = [tree, given]
        kept = [leaf for leaf, place in zip(leaves, given, strict=True) if place is None]
        return (y, beside), to_host(kept) if applied.on_host else kept

    (y, _), kept = jax.lax.scan(step, (applied.x, applied.beside), (applied.weights, applied.inputs))
    tree, given = form
    return Passed(applied, y, kept, tree, given, dtype)


def layer_of(stacked: Any, layer: jax.Array) -> Any:
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, layer, 0, keepdims=False), stacked)
