"""A network's forward and backward pass with its stacks of layers cut out of what lies around them.

A network with n stacks is n + 1 functions with the stacks between: from the batch to the first stack's x, from one
stack's result to the next one's x, from the last one's to the loss. Each is differentiated for itself, and each is
the whole network with its stacks taken out, so that no network needs to know: what a function does not use is never
computed. Tables are cut out likewise: the rows found for a batch, which is where it begins, and an output projection
whose loss is computed in slices, which is where it ends. A table that nothing else computes with has no gradient but
slices of one, made when they are asked for. What is frozen has no gradient, but lets those of others through.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxmem.models.vocab_slices import Use, Used, used_by
from jaxmem.optim.parts import put, select
from jaxmem.quant.precision import Params
from jaxmem.sharding.weights import is_quantized, placed, points
from jaxmem.stack import Applied, Passed, applied_by, forward
from jaxmem.step.objective import Batch, Objective, Sums

Tree = Any
Path = tuple[Any, ...]
# (a table, slices, which one) -> its gradient; without slices the whole one
OfSlice = Callable[..., jax.Array]


class Segments:
    """One batch's forward pass; then any number of backward passes."""

    def __init__(
        self,
        graphdef: Any,
        objective: Objective,
        params: Params,
        batch: Batch,
        key: jax.Array,
        own: Params,  # the parameters that learn, None in the place of others
        dtype: DTypeLike | None = None,  # of gradients; None: each in its weight's own
        micro: int = 1,  # into how many parts of the batch stacks go, one after the other
    ) -> None:
        self._graphdef, self._objective, self._params, self._batch, self._key = graphdef, objective, params, batch, key
        self._own = own
        self._cuts: list[Passed | Used] = []  # in the order in which they are applied
        self._weights: list[Any] = []  # of each cut

        def keep(applied: Applied) -> tuple[Any, None]:
            learning = _at(own, _place(params, applied.weights))
            learns = jax.tree.map(lambda w: w is not None, learning, is_leaf=lambda w: w is None or is_quantized(w))
            return self._cut(forward(applied, learns, dtype, micro), applied.weights), None

        def keep_use(use: Use) -> Any:
            return None if use.x is None and self._cuts else self._cut(use.forward(), use.weight)

        network = nnx.merge(graphdef, params)
        with applied_by(keep), used_by(keep_use):
            x = objective.features(network, batch, key)
            if self._is_cut(partial(objective.sums, network), x):
                objective.sums(network, x, batch)
        self._places = [_place(params, weights) for weights in self._weights]
        self.stacks = {n: cut for n, cut in enumerate(self._cuts) if isinstance(cut, Passed)}
        uses = {n: self._places[n] for n in range(len(self._cuts)) if n not in self.stacks}
        in_stacks = [self._places[n] for n in self.stacks]
        self._rest = _without(params, in_stacks)  # the parameters that are in no stack
        self._at = points(_without(own, in_stacks), dtype)
        self._asked = [self._asked_by(number) for number in range(len(self._cuts) + 1)]
        elsewhere = set().union(*self._asked)
        self.tables = {
            place: [n for n, other in uses.items() if other == place]
            for place in uses.values()
            if place not in elsewhere
        }
        self._at = jax.tree_util.tree_map_with_path(lambda path, x: None if path in self.tables else x, self._at)
        _, self._last, self.sums = jax.vjp(
            partial(self._segment, len(self._cuts)), self._at, self._cuts[-1].y, has_aux=True
        )

    sums: Sums

    def stacked(self, number: int, tree: Tree) -> Tree:
        """What has the form of a stack's weights, at their place among the parameters."""
        return at_place(self._places[number], tree)

    def learning(self, number: int) -> Tree:
        """A stack's weights that learn."""
        return self.stacked(number, _at(self._own, self._places[number]))

    def weights(self, number: int, learning: Tree) -> Any:
        """All of a stack's weights, of which some are these."""
        return put(self.stacks[number].applied.weights, _at(learning, self._places[number]))

    @cached_property
    def last(self) -> Tree:
        """Of the parameters in no stack those that only the last function uses: an output projection of its own."""
        earlier = set().union(*self._asked[:-1])
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(self._at)]
        return _without(self._at, [path for path in paths if path in earlier] + list(self.tables))

    def backward(
        self, through: Callable[[int, Any], Any], begin: Callable[[Tree], Any] = lambda _: None
    ) -> tuple[Tree, dict[Path, OfSlice]]:
        """Gradients of the parameters in no stack, for the mean of the loss; of a table not the gradient but what makes
        any slice of it. `through(number, g)` goes back through a stack, from the gradient of what it gave to that of
        what it was applied to. Before all, `begin` is given the gradients of `last`; the stacks wait for what it gives
        back."""
        grads, g = self._last(1.0 / jnp.maximum(self.sums["count"], 1.0))
        _, g = jax.lax.optimization_barrier((begin(select(grads, self.last)), g))
        given: dict[int, Any] = {}
        for number in reversed(range(len(self._cuts))):
            cut, given[number] = self._cuts[number], g
            g = through(number, g) if isinstance(cut, Passed) else cut.backward(g)
            if not isinstance(cut, Passed) and self._places[number] not in self.tables:
                of_all = cut.of_weight(given[number], _at(self._params, self._places[number]))
                grads = _added(grads, self._places[number], of_all)
            if g is None:
                break
            before = self._cuts[number - 1].y if number else None
            _, derivative = jax.vjp(partial(self._segment, number), self._at, before)
            own, g = derivative(g)
            grads = jax.tree.map(jnp.add, grads, own)

        def of_slice(numbers: list[int]) -> OfSlice:
            uses = [(cut, given[n]) for n in numbers if not isinstance(cut := self._cuts[n], Passed)]
            return lambda weight, *which: reduce(jnp.add, (cut.of_weight(g, weight, *which) for cut, g in uses))

        learning = {place: uses for place, uses in self.tables.items() if _at(self._own, place) is not None}
        return _without(grads, list(self.tables)), {place: of_slice(uses) for place, uses in learning.items()}

    def _cut(self, cut: Passed | Used, weights: Any) -> Any:
        self._cuts.append(cut)
        self._weights.append(weights)
        return cut.y

    def _is_cut(self, sums: Callable[[Any, Batch], Sums], x: Any) -> bool:
        """Whether the loss computes with a table that can be cut out."""
        found: list[bool] = []

        def note(use: Use) -> jax.Array:
            found.append(True)
            return use.forward().y

        with used_by(note):
            jax.eval_shape(lambda: sums(x, self._batch))
        return bool(found)

    def _asked_by(self, number: int) -> set[Path]:
        """The parameters in no stack that a function computes with."""
        before = self._cuts[number - 1].y if number else None
        traced = jax.make_jaxpr(partial(self._segment, number))(self._at, before).jaxpr
        asked = {id(x) for equation in traced.eqns for x in equation.invars}
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(self._at)]
        return {path for path, x in zip(paths, traced.invars, strict=False) if id(x) in asked}

    def _segment(self, number: int, at: Tree, before: Any) -> Any:
        """What the cut of this number is applied to, of what the one before it gave; after the last one, the loss, and
        all sums."""
        seen: list[Any] = []

        def cut(x: Any) -> Any:
            seen.append(x)
            return before if len(seen) == number else self._cuts[len(seen) - 1].y

        def cut_use(use: Use) -> Any:
            return None if use.x is None and seen else cut(use.x)

        network = nnx.merge(self._graphdef, _with(self._params, placed(self._rest, at)))
        with applied_by(lambda applied: (cut(applied.x), None)), used_by(cut_use):
            x = self._objective.features(network, self._batch, self._key)
            if number < len(seen):
                return seen[number]
            sums = self._objective.sums(network, x, self._batch)
        return (sums["loss"], sums) if number == len(seen) else seen[number]


def at_place(place: Path, tree: Tree) -> Tree:
    """A tree of parameters that has only what lies at this place."""
    for step in reversed(place):
        tree = {step.key: tree}
    return tree


def _at(tree: Tree, place: Path) -> Tree:
    for step in place:
        tree = tree[step.key]
    return tree


def _added(grads: Tree, place: Path, more: jax.Array) -> Tree:
    return jax.tree_util.tree_map_with_path(lambda path, g: g + more.astype(g.dtype) if path == place else g, grads)


def _place(params: Params, weights: Tree) -> Path:
    """Where a stack's weights, or a table, are among the parameters: the same arrays."""
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
