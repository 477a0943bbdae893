"""A stack with some trainable layers, divided into consecutive ranges in which each weight is trainable or frozen.

Frozen weights are indexed by layer where a layer is computed, not sliced: a slice would be a copy. If nothing before or
within a range has a gradient, jax does not differentiate it and saves none of its activations. With the last N of L
layers trainable, the backward pass, saved activations and gradients are those of N layers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem.sharding.host import take_layer
from jaxmem.sharding.weights import PartialStack, StoredWeight

Run = Callable[[Any, Any, Any, Any], tuple[Any, Any]]  # (weights of a layer, x, its input, beside) -> (x, output)


@dataclass(frozen=True)
class LayerRange:
    """Layers from `start` to before `stop`."""

    start: int
    stop: int

    def restrict(self, run: Run, weights: Any, inputs: Any, beside: Any) -> tuple[Run, Any, Any, Any]:
        """(run, weights, inputs, beside) of these layers, which are applied as a stack."""
        leaves, form = jax.tree.flatten(weights, is_leaf=_is_kind)
        numbers = jnp.arange(self.start, self.stop, dtype=jnp.int32)
        # Frozen weights have no gradient, also if gradients of `beside` are requested.
        stay = [
            StoredWeight(leaf.stored, None) if isinstance(leaf, StoredWeight | PartialStack) else None
            for leaf in leaves
        ]

        def each(own: list[Any], x: Any, one: Any, beside: Any) -> tuple[Any, Any]:
            (number, one), (stay, beside) = one, beside
            layer = [
                at if rest is None else StoredWeight(take_layer(rest.stored, number), at)
                for at, rest in zip(own, stay, strict=True)
            ]
            return run(jax.tree.unflatten(form, layer), x, one, beside)

        inputs = jax.tree.map(lambda x: x[self.start : self.stop], inputs)
        return each, [self._trainable(leaf) for leaf in leaves], (numbers, inputs), (stay, beside)

    def _trainable(self, leaf: Any) -> Any:
        """The trainable part of a weight in this range, or None."""
        start, stop, at = self.start, self.stop, leaf
        if isinstance(leaf, StoredWeight):
            at = leaf.at
        elif isinstance(leaf, PartialStack):
            if self.start not in leaf.layers:
                return None
            start = leaf.layers.index(self.start)
            stop, at = start + self.stop - self.start, leaf.at
        return jax.tree.map(lambda x: x[start:stop], at)


def layer_ranges(weights: Any) -> list[LayerRange]:
    """The ranges of a stack; a single range if no weight is a `PartialStack`."""
    leaves = jax.tree.leaves(weights, is_leaf=_is_kind)
    count = leaves[0].shape[0]
    learning = [{*leaf.layers} for leaf in leaves if isinstance(leaf, PartialStack)]
    edges = [n for n in range(1, count) if any((n in layers) != (n - 1 in layers) for layers in learning)]
    return [LayerRange(start, stop) for start, stop in pairwise((0, *edges, count))]


def _is_kind(x: Any) -> bool:
    return isinstance(x, StoredWeight | PartialStack)
