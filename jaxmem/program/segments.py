"""A network's forward and backward pass with its stacks of layers cut out of what lies around them.

A network with n stacks is n + 1 functions with the stacks between: from the batch to the first stack's x, from one
stack's result to the next one's x, from the last one's to the loss. Each is differentiated for itself, and each is
the whole network with its stacks taken out, so that no network needs to know: what a function does not use is never
computed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxmem.optim.parts import select
from jaxmem.precision import Params
from jaxmem.program.objective import Batch, Objective, Sums
from jaxmem.stack import Applied, Passed, applied_by, forward
from jaxmem.weights import placed, points

Tree = Any
Path = tuple[Any, ...]


class Segments:
    """One batch's forward pass; then any number of backward passes."""

    def __init__(
        self,
        graphdef: Any,
        objective: Objective,
        params: Params,
        batch: Batch,
        key: jax.Array,
        dtype: DTypeLike | None = None,  # of gradients; None: each in its weight's own
    ) -> None:
        self._graphdef, self._objective, self._params, self._batch, self._key = graphdef, objective, params, batch, key
        self.stacks: list[Passed] = []  # in the order in which they are applied

        def keep(applied: Applied) -> tuple[Any, None]:
            self.stacks.append(forward(applied, dtype))
            return self.stacks[-1].y, None

        with applied_by(keep):
            objective.features(nnx.merge(graphdef, params), batch, key)
        self._places = [_place(params, one.applied.weights) for one in self.stacks]
        self._rest = _without(params, self._places)  # the parameters that are in no stack
        self._at = points(self._rest, dtype)
        _, self._last, self.sums = jax.vjp(
            partial(self._segment, len(self.stacks)), self._at, self.stacks[-1].y, has_aux=True
        )

    sums: Sums

    def stacked(self, number: int, tree: Tree) -> Tree:
        """What has the form of a stack's weights, at their place among the parameters."""
        for step in reversed(self._places[number]):
            tree = {step.key: tree}
        return tree

    def own(self, number: int, tree: Tree) -> Tree:
        """And back."""
        for step in self._places[number]:
            tree = tree[step.key]
        return tree

    @cached_property
    def last(self) -> Tree:
        """Of the parameters in no stack those that only the last function uses: an output projection of its own."""
        earlier = set()
        for number in range(len(self.stacks)):
            before = self.stacks[number - 1].y if number else None
            traced = jax.make_jaxpr(partial(self._segment, number))(self._at, before).jaxpr
            asked = {id(x) for equation in traced.eqns for x in equation.invars}
            earlier |= {place for place, x in enumerate(traced.invars) if id(x) in asked}
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(self._at)]
        return _without(self._at, [path for place, path in enumerate(paths) if place in earlier])

    def backward(self, through: Callable[[int, Any], Any], begin: Callable[[Tree], Any] = lambda _: None) -> Tree:
        """Gradients of the parameters in no stack, for the mean of the loss. `through(number, g)` goes back through
        a stack, from the gradient of what it gave to that of what it was applied to. Before all, `begin` is given
        the gradients of `last`; the stacks wait for what it gives back."""
        grads, g = self._last(1.0 / jnp.maximum(self.sums["count"], 1.0))
        _, g = jax.lax.optimization_barrier((begin(select(grads, self.last)), g))
        for number in reversed(range(len(self.stacks))):
            before = self.stacks[number - 1].y if number else None
            _, derivative = jax.vjp(partial(self._segment, number), self._at, before)
            own, g = derivative(through(number, g))
            grads = jax.tree.map(jnp.add, grads, own)
        return grads

    def _segment(self, number: int, at: Tree, before: Any) -> Any:
        """What the stack of this number is applied to, of what the one before it gave; after the last one, the loss,
        and all sums."""
        seen: list[Any] = []

        def cut(applied: Applied) -> tuple[Any, None]:
            seen.append(applied.x)
            return (before if len(seen) == number else applied.x), None

        network = nnx.merge(self._graphdef, _with(self._params, placed(self._rest, at)))
        with applied_by(cut):
            x = self._objective.features(network, self._batch, self._key)
        if number < len(seen):
            return seen[number]
        sums = self._objective.sums(network, x, self._batch)
        return sums["loss"], sums


def _place(params: Params, weights: Tree) -> Path:
    """Where a stack's weights are among the parameters: the same arrays."""
    path, leaf = jax.tree_util.tree_leaves_with_path(weights)[0]
    whole = next(at for at, x in jax.tree_util.tree_leaves_with_path(params) if x is leaf)
    return whole[: len(whole) - len(path)]


def _without(params: Params, places: list[Path]) -> Params:
    kept = {}
    for name, value in params.items():
        inside = [at[1:] for at in places if at[0].key == name]
        if () not in inside:
            kept[name] = _without(value, inside) if inside else value
    return kept


def _with(params: Params, rest: Params) -> Params:
    return {
        name: value if name not in rest else _with(value, rest[name]) if isinstance(value, dict) else rest[name]
        for name, value in params.items()
    }
