"""A stack of which some layers learn, as stacks one behind the other: in each a weight learns in all layers or in none.

What stays is indexed by layer wherever one runs, never cut: a cut would be a copy. It has no gradient; and where
nothing before a section has one either, jax does not go back through it, and keeps nothing of it: with the last N of L
layers learning, the backward pass, what it needs and the gradients are those of N layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem.sharding.weights import PartialStack, StoredWeight

Run = Callable[[Any, Any, Any, Any], tuple[Any, Any]]  # (one layer's weights, x, its input, beside) -> (x, output)


@dataclass(frozen=True)
class LayerRange:
    """Layers from one to before another."""

    start: int
    stop: int

    def of(self, run: Run, weights: Any, inputs: Any, beside: Any) -> tuple[Run, Any, Any, Any]:
        """What to apply as a stack: run, weights, inputs and what is beside."""
        leaves, form = jax.tree.flatten(weights, is_leaf=_is_kind)
        numbers = jnp.arange(self.start, self.stop, dtype=jnp.int32)
        # A `Point` that has no gradient, also where gradients of what is beside are asked for.
        stay = [
            StoredWeight(leaf.stored, None) if isinstance(leaf, StoredWeight | PartialStack) else None
            for leaf in leaves
        ]

        def each(own: list[Any], x: Any, one: Any, beside: Any) -> tuple[Any, Any]:
            (number, one), (stay, beside) = one, beside
            layer = [
                at if rest is None else StoredWeight(_at(rest.stored, number), at)
                for at, rest in zip(own, stay, strict=True)
            ]
            return run(jax.tree.unflatten(form, layer), x, one, beside)

        inputs = jax.tree.map(lambda x: x[self.start : self.stop], inputs)
        return each, [self._learning(leaf) for leaf in leaves], (numbers, inputs), (stay, beside)

    def _learning(self, leaf: Any) -> Any:
        """What learns of a weight here; None: nothing."""
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
    """Of a stack's weights; one section: they are as everywhere else."""
    leaves = jax.tree.leaves(weights, is_leaf=_is_kind)
    count = leaves[0].shape[0]
    learning = [{*leaf.layers} for leaf in leaves if isinstance(leaf, PartialStack)]
    edges = [n for n in range(1, count) if any((n in layers) != (n - 1 in layers) for layers in learning)]
    return [LayerRange(start, stop) for start, stop in pairwise((0, *edges, count))]


def _at(stack: Any, layer: jax.Array) -> Any:
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, layer, 0, keepdims=False), stack)


def _is_kind(x: Any) -> bool:
    return isinstance(x, StoredWeight | PartialStack)
