"""An update in which a layer's gradient lives only until that layer is updated.

The backward pass goes through the layers from the last to the first. Each one's gradient is made, its weights and its
part of the optimizer's state are read, updated and written where they were, and the gradient is gone. With P
parameters in N layers the gradients hold P / N numbers in place of P, whatever the optimizer; results are those of an
update after the pass, which goes through the same layers one by one (Lv et al., arXiv:2306.09782). Of a batch in
micro-batches a layer goes back through all before it is updated. What is frozen lets gradients through. Embedding and
output projection are updated at the end, slice by slice (`in_slices`). Of what else is in no layer, that after the
layers is updated before them, that before and between them at the end.

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
from jaxmem.optim.parts import Part, Write, layer_at, pinned, put, select, with_layer, without
from jaxmem.quant.precision import Params
from jaxmem.sharding import axes_at_rest, is_axes
from jaxmem.sharding.host import brought, sent_as
from jaxmem.sharding.weights import is_quantized
from jaxmem.stack import layer_of, together
from jaxmem.step import nonfinite
from jaxmem.step.host_state import fetched, stored
from jaxmem.step.objective import Batch, Objective, Sums
from jaxmem.step.segments import Path, Segments, at_place
from jaxmem.step.vocab_update import Table

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
    chosen: Callable[[Tree], Tree]  # of all parameters those that learn, None in the place of others
    on_host: bool = False  # whether the optimizer's state of layers waits in host memory
    entries: int | None = None  # of a table that are updated at once; None: as many as have 16 M numbers

    def __call__(
        self, params: Params, opt_state: Any, batch: Batch, keys: jax.Array, write: Write
    ) -> tuple[Params, Any, Sums, jax.Array]:
        """New weights, new state of the optimizer, sums of the batch, and the squares of the mean's gradient as
        `culprit` orders them. Leaves of the batch, and `keys`, are [micro-batches, rows, ...]."""
        micro = len(keys)
        batch, key = jax.tree.map(lambda x: x[0], (batch, keys)) if micro == 1 else together((batch, keys), micro)
        own = self.chosen(params)
        network = Segments(self.graphdef, self.objective, params, batch, key, own, self.gradients_in, micro)
        parts = {n: self._parts(network.learning(n)) for n in network.stacks}
        norm = self._measured(network, parts, params, opt_state) if self.measures else None
        done: list[tuple[Tree, Tree, Tree]] = []  # weights, state, the sum of each gradient's squares

        def through(number: int, g: Any) -> Any:
            stack = network.stacks[number]
            before = [part.state(opt_state) for part in parts[number]]
            layers = jax.tree.leaves(stack.applied.weights)[0].shape[0]

            def ready(carried: Any, layer: jax.Array) -> list[Tree] | None:
                """What waits in host memory is on its way while the gradient is made."""
                if not self.on_host:
                    return None
                each = zip(parts[number], carried[1], before, strict=True)
                return [fetched(state, part.state_axes, layer, old) for part, state, old in each]

            def visit(carried: Any, layer: jax.Array, dw: Tree, brought: list[Tree] | None) -> Any:
                """One weight after the other: what the update of one takes is free before the next one's begins."""
                weights, states, squares = carried
                grads, done = network.stacked(number, dw), list[Tree]()
                for place, (part, state, old) in enumerate(zip(parts[number], states, before, strict=True)):
                    own = pinned(select(grads, part.axes, is_leaf=is_axes), part.axes, "gradients")
                    own, weights, state, done = jax.lax.optimization_barrier((own, weights, state, done))
                    whole = select(weights, part.axes, is_leaf=is_axes)
                    # Counts of updates are those before this one.
                    kept = layer_at(state, part.state_axes, layer, old) if brought is None else brought[place]
                    # Read once: of two who read a layer one may come after it is written, and XLA would copy the stack.
                    mine = jax.lax.optimization_barrier(layer_of(whole, layer))
                    new, kept = part.update(own, kept, mine, write, layer=layer, layers=layers, norm=norm)
                    weights = put(weights, with_layer(whole, axes_at_rest(part.axes, whole), "weights", layer, new))
                    if brought is None:
                        done = [*done, with_layer(state, part.state_axes, "optimizer", layer, kept)]
                    else:
                        done = [*done, stored(state, part.state_axes, layer, kept)]
                    sums = jax.tree.map(lambda each, g: each.at[layer].set(_square(g)), select(squares, own), own)
                    squares = put(squares, sums)
                return weights, done, squares

            weights = network.learning(number)
            squares = jax.tree.map(lambda _: jnp.zeros(layers, jnp.float32), weights, is_leaf=is_quantized)
            begin = weights, before, squares
            end, g = stack.backward(g, lambda carried: network.weights(number, carried[0]), visit, begin, ready)
            done.append(end)
            return g

        def updated(grads: Tree) -> Tree:
            """Of parameters in no stack, all at once."""
            if not jax.tree.leaves(grads):
                return grads
            weights = select(params, grads)
            part = self._part(weights)
            grads = pinned(grads, part.axes, "gradients")
            before = part.state(opt_state)
            new, state = part.update(grads, brought(before), weights, write, norm=norm)
            state = sent_as(state, before)
            done.append((new, [state], jax.tree.map(_square, grads)))
            return new

        grads, tables = network.backward(through, begin=updated)
        updated(without(grads, network.last))
        for place, gradient in tables.items():
            new, state, square = self._table(place, params, opt_state).updated(gradient, write, norm)
            done.append((new, [state], at_place(place, square)))
        sums = {path: x for *_, sums in done for path, x in jax.tree_util.tree_leaves_with_path(sums)}
        axes = self.chosen(self.axes)
        found = jax.tree_util.tree_map_with_path(lambda path, _: sums[path], axes, is_leaf=is_axes)
        squares = nonfinite.in_order(found, axes)
        params = put(params, *(weights for weights, *_ in done))
        opt_state = put(opt_state, *(state for _, states, _ in done for state in states))
        return params, optim.remember(opt_state, jnp.sqrt(jnp.sum(squares))), network.sums, squares

    def _measured(self, network: Segments, parts: dict[int, list[Part]], params: Params, opt_state: Any) -> jax.Array:
        """The length of all gradients, by a backward pass that keeps none."""
        found = []

        def through(number: int, g: Any) -> Any:
            stack, axes = network.stacks[number], [part.axes for part in parts[number]]

            def visit(squares: jax.Array, _: jax.Array, dw: Tree, __: None) -> jax.Array:
                grads = network.stacked(number, dw)
                each = (_squares(pinned(select(grads, own, is_leaf=is_axes), own, "gradients")) for own in axes)
                return sum(each, squares)

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

    def _parts(self, params: Tree) -> list[Part]:
        """One for each weight."""
        places = [path for path, _ in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_quantized)]
        return [self._part(select(params, at_place(place, 0))) for place in places]

    def _part(self, params: Tree) -> Part:
        return Part.of(params, self.optimizer_for, self.axes, self.opt_axes)


def _squares(grads: Tree) -> jax.Array:
    return jax.tree.reduce(jnp.add, jax.tree.map(_square, grads), jnp.zeros((), jnp.float32))


def _square(g: jax.Array) -> jax.Array:
    return jnp.sum(jnp.square(g.astype(jnp.float32)))
