"""An update in which a layer's gradient lives only until that layer is updated.

The backward pass goes through the layers from the last to the first. Each one's gradient is made, its weights and its
part of the optimizer's state are read, updated and written where they were, and the gradient is gone. With P
parameters in N layers the gradients hold P / N numbers in place of P, whatever the optimizer; results are those of an
update after the pass, which goes through the same layers one by one (Lv et al., arXiv:2306.09782). What lies
after the layers is updated before them, what lies before and between them at the end.

What asks for the length of all gradients before the first update (clipping by the global norm) costs a second
backward pass, one that only measures.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxmem import optim
from jaxmem.optim.parts import Part, layer_at, pinned, put, select, with_layer, without
from jaxmem.precision import Params
from jaxmem.program.in_slices import Table
from jaxmem.program.objective import Batch, Objective, Sums
from jaxmem.program.segments import Path, Segments, at_place
from jaxmem.sharding import axes_at_rest

Tree = Any


@dataclass(frozen=True)
class During:
    graphdef: Any
    axes: Tree
    opt_axes: Tree
    objective: Objective
    optimizer_for: Callable[[Tree], optax.GradientTransformationExtraArgs]  # of some of the parameters' axes
    gradients_in: np.dtype | None  # None: each in its weight's own dtype
    measures: bool  # whether the optimizer wants to know the length of all gradients first
    entries: int | None = None  # of a table that are updated at once; None: as many as have 16 M numbers

    def __call__(
        self, params: Params, opt_state: Any, batch: Batch, key: jax.Array, draws: jax.Array | None
    ) -> tuple[Params, Any, Sums, jax.Array]:
        """New weights, new state of the optimizer, sums of the batch, and the length of the mean's gradient."""
        network = Segments(self.graphdef, self.objective, params, batch, key, self.gradients_in)
        parts = {n: self._part(network.stacked(n, stack.applied.weights)) for n, stack in network.stacks.items()}
        norm = self._measured(network, parts, params, opt_state) if self.measures else None
        done: list[tuple[Tree, Tree, jax.Array]] = []

        def through(number: int, g: Any) -> Any:
            stack, part = network.stacks[number], parts[number]
            weights = network.stacked(number, stack.applied.weights)
            before = part.state(opt_state)
            layers = jax.tree.leaves(weights)[0].shape[0]

            def visit(carried: Any, layer: jax.Array, own: Tree, dw: Tree) -> Any:
                weights, state, squares = carried
                own, dw = network.stacked(number, own), pinned(network.stacked(number, dw), part.axes, "gradients")
                kept = layer_at(state, part.state_axes, layer, before)  # counts of updates are those before this one
                own, kept = part.update(dw, kept, own, draws, layer=layer, layers=layers, norm=norm)
                weights = with_layer(weights, axes_at_rest(part.axes, weights), "weights", layer, own)
                return weights, with_layer(state, part.state_axes, "optimizer", layer, kept), squares + _squares(dw)

            begin = weights, before, jnp.zeros((), jnp.float32)
            end, g = stack.backward(g, lambda carried: network.own(number, carried[0]), visit, begin)
            done.append(end)
            return g

        def updated(grads: Tree) -> Tree:
            """Of parameters in no stack, all at once."""
            if not jax.tree.leaves(grads):
                return grads
            weights = select(params, grads)
            part = self._part(weights)
            grads = pinned(grads, part.axes, "gradients")
            new, state = part.update(grads, part.state(opt_state), weights, draws, norm=norm)
            done.append((new, state, _squares(grads)))
            return new

        grads, tables = network.backward(through, begin=updated)
        updated(without(grads, network.last))
        for place, gradient in tables.items():
            table = self._table(place, params, opt_state)
            done.append(table.updated(gradient, draws, norm))
        norm = jnp.sqrt(sum(squares for *_, squares in done))
        params = put(params, *(weights for weights, *_ in done))
        opt_state = put(opt_state, *(state for _, state, _ in done))
        return params, optim.remember(opt_state, norm), network.sums, norm

    def _measured(self, network: Segments, parts: dict[int, Part], params: Params, opt_state: Any) -> jax.Array:
        """The length of all gradients, by a backward pass that keeps none."""
        found = []

        def through(number: int, g: Any) -> Any:
            stack = network.stacks[number]

            def visit(squares: jax.Array, _layer: jax.Array, _own: Tree, dw: Tree) -> jax.Array:
                return squares + _squares(pinned(network.stacked(number, dw), parts[number].axes, "gradients"))

            squares, g = stack.backward(g, lambda _: stack.applied.weights, visit, jnp.zeros((), jnp.float32))
            found.append(squares)
            return g

        grads, tables = network.backward(through)
        for place, gradient in tables.items():
            found.append(self._table(place, params, opt_state).squares(gradient))
        return jnp.sqrt(_squares(grads) + sum(found))

    def _table(self, place: Path, params: Params, opt_state: Any) -> Table:
        weights = select(params, at_place(place, 0))
        part = self._part(weights)
        return Table(part, weights, part.state(opt_state), self.gradients_in, self.entries)

    def _part(self, params: Tree) -> Part:
        return Part.of(params, self.optimizer_for, self.axes, self.opt_axes)


def _squares(grads: Tree) -> jax.Array:
    return jnp.square(optim.global_norm(grads))
