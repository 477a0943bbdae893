"""Updates in place, of a stack layer by layer and of an embedding or output matrix slice by slice.

With `memory.offload: optimizer` (`update_singly`), optimizer state in host memory is copied to the device and back one
layer (`StackUpdate.update_all`) or one slice (`VocabUpdate`) at a time. With P parameters in N layers and s bytes of
state per parameter, a device stores the state of two layers, 2 s P / N bytes, instead of s P. The host stores s P
bytes, and 2 s P bytes per step are sent between host and device (Ren et al., arXiv:2101.06840). Frozen weights are
copied one layer ahead in each pass (`stack`), and not copied back.

With `memory.update: during`, the backward pass calls a `LayerUpdate` with the gradients of each layer. `VocabUpdate`
then computes the gradient of a slice right before the slice is updated. With V entries of E values and slices of v
entries, gradient and update take 2 v E values instead of 2 V E. If an optimizer needs sums over the complete matrix,
each sum takes one more pass over all slices (`sliced_sums`). A pass recomputes the gradient: for T tokens, 4 T V E
FLOPs for an output projection, and very few for an embedding.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem.models.vocab_slices import SLICE_SIZE, VocabSlices, even_slices
from jaxmem.optim.apply import SlicedSums, SumOverSlices, VocabSlice, Writer, sliced_sums, sum_of_squares
from jaxmem.optim.groups import ParameterGroup, constrain_tree
from jaxmem.quant.precision import Params
from jaxmem.quant.qtensor import with_sliced_sizes
from jaxmem.sharding.arrays import constrain, map_layers, row_major_if_gathered
from jaxmem.sharding.gathering import stored_axes
from jaxmem.sharding.host import fetch_from_host, is_on_host, put_layer, send_like, take_layer
from jaxmem.sharding.table import Axes, Role, axis_name, is_axes, is_stacked
from jaxmem.sharding.trees import Path, merge, nest, select, single_weights, subtree
from jaxmem.sharding.weights import Weight, is_encoded
from jaxmem.stack.reverse import Visitor
from jaxmem.step.state import StepSpec
from jaxmem.typing import Tree


def update_singly(
    spec: StepSpec, params: Params, grads: Params, opt_state: Tree, write: Writer, norm: jax.Array | None
) -> tuple[list[Tree], list[Tree]]:
    """Updates parameters one after the other. Returns the new value of each, and the new state of its group.

    Args:
        spec: the specification of the step.
        params: the parameters to update.
        grads: their gradients.
        opt_state: the state of the optimizer.
        write: adds updates to weights.
        norm: the norm of all gradients; None: the optimizer does not need it.
    """
    new_params = []
    new_states = []
    for weight in single_weights(params):
        group = spec.group(weight)
        gradient = select(grads, group.axes, is_leaf=is_axes)
        state = group.state(opt_state)
        (names,) = jax.tree.leaves(group.axes, is_leaf=is_axes)
        (g,) = jax.tree.leaves(gradient)
        if is_stacked(names):
            new, state = StackUpdate(group, state, write, norm, len(g)).update_all(gradient, weight)
        elif "vocab" in names:
            slice_of = partial(_slice_of, g, names.index("vocab"))
            new, state, _ = VocabUpdate(group, weight, state, g.dtype).update(slice_of, write, norm)
        else:
            new, state = group.update_weights(gradient, state, weight, write, norm=norm)
        new_params.append(new)
        new_states.append(state)
    return new_params, new_states


def _slice_of(
    gradient: jax.Array, dim: int, _: Weight, slices: VocabSlices | None = None, j: jax.Array | None = None, /
) -> jax.Array:
    return gradient if slices is None or j is None else slices.read(gradient, dim, j)


@dataclass(frozen=True)
class StackUpdate:
    """The update of the only weight of a group, a stack of layers, one layer at a time and in place."""

    group: ParameterGroup
    before: Tree  # the state before the update, from which each layer reads the number of earlier updates
    write: Writer
    norm: jax.Array | None
    layers: int  # number of layers of the complete stack
    first: int | jax.Array = 0  # the position of the first updated layer in the complete stack

    def update_all(self, grads: Tree, weights: Tree) -> tuple[Tree, Tree]:
        """Returns the new stack and its new state. Each pipeline stage updates its own layers."""
        stored = stored_axes(self.group.axes, weights)
        axes = self.group.axes, self.group.state_axes, stored, ()
        update = map_layers(self._update_layers, self.layers, axes, (stored, self.group.state_axes))
        return update(grads, self.before, weights, self.norm)

    def _update_layers(
        self, grads: Tree, state: Tree, weights: Tree, norm: jax.Array | None, first: jax.Array
    ) -> tuple[Tree, Tree]:
        """Updates all layers of a pipeline stage, one after the other. The state of the next layer is copied from host
        memory while a layer is updated."""
        stage = replace(self, before=state, norm=norm, first=first)
        last = jax.tree.leaves(weights)[0].shape[0] - 1

        def step(layer: jax.Array, carry: tuple[Tree, Tree, Tree]) -> tuple[Tree, Tree, Tree]:
            weights, state, fetched_state = carry
            following = stage.read_state(state, jnp.minimum(layer + 1, last))
            new, new_state = stage.update(layer, take_layer(grads, layer), fetched_state, take_layer(weights, layer))
            # The next layer's state is read before the state is overwritten; otherwise XLA would copy all of the state.
            following, state = jax.lax.optimization_barrier((following, state))
            return *stage.put(weights, state, layer, new, new_state), following

        begin = weights, state, stage.read_state(state, jnp.int32(0))
        weights, state, _ = jax.lax.fori_loop(0, last + 1, step, begin)
        return weights, state

    def read_state(self, state: Tree, layer: jax.Array) -> Tree:
        """The state of one layer, copied to the device if it is in host memory."""

        def read(names: Axes, x: jax.Array, before: jax.Array) -> jax.Array:
            return fetch_from_host(take_layer(x, layer)) if is_stacked(names) else before

        return jax.tree.map(read, self.group.state_axes, state, self.before, is_leaf=is_axes)

    def update(self, layer: jax.Array, gradient: Tree, state: Tree, weight: Tree) -> tuple[Tree, Tree]:
        """The new weight and the new state of one layer."""
        extra = {"layer": self.first + layer, "layers": self.layers, "norm": self.norm}
        return self.group.update_weights(gradient, state, weight, self.write, **extra)

    def put(self, weights: Tree, state: Tree, layer: jax.Array, new: Tree, new_state: Tree) -> tuple[Tree, Tree]:
        """The stack and its state, with those of one layer replaced."""
        axes = stored_axes(self.group.axes, weights)
        weights = _put_stacked(weights, axes, "weights", layer, new)
        return weights, _put_stacked(state, self.group.state_axes, "optimizer", layer, new_state)


def _put_stacked(tree: Tree, axes: Tree, role: Role, layer: jax.Array, new: Tree) -> Tree:
    """Writes one layer into stacked leaves, in the same memory. Leaves that are not stacked are replaced."""

    def put_leaf(names: Axes, x: jax.Array, new: jax.Array) -> jax.Array:
        if not is_stacked(names):
            return new
        # The layer is sharded before it is written, so that no other layer is communicated.
        new = row_major_if_gathered(constrain(new, *names[1:], role=role), names[1:], role, "optimizer")
        stacked = put_layer(x, layer, send_like(new, x))
        return stacked if is_on_host(x) else constrain(stacked, *names, role=role)

    return jax.tree.map(put_leaf, axes, tree, new, is_leaf=is_axes)


class Updated(NamedTuple):
    """Parameters after their update. For a stack it is the carry of the loop over the layers, some of which are updated
    already."""

    weights: Tree
    states: list[Tree]  # of their groups
    squares: Tree  # for each weight the sum of squares of its gradient; of a stack for each layer


@dataclass(frozen=True)
class LayerUpdate:
    """Updates all weights of a layer, when the backward pass has computed their gradients."""

    stacks: Sequence[StackUpdate]  # one per weight

    def visitor(self, path: Path, weights: Tree, trainable: Tree, layers: int) -> Visitor[Updated]:
        """Updates each layer of a stack as soon as a backward pass has its gradient.

        Args:
            path: of the stack in the parameter tree.
            weights: all weights of the stack before the update.
            trainable: its trainable weights, at `path`.
            layers: number of layers in `weights`.
        """

        def updated_weights(carry: Updated) -> Tree:
            return merge(weights, subtree(carry.weights, path))

        def visit(carry: Updated, layer: jax.Array, dw: Tree, fetched_states: list[Tree] | None) -> Updated:
            return self.update_layer(carry, layer, nest(path, dw), fetched_states)

        squares = jax.tree.map(lambda _: jnp.zeros(layers, jnp.float32), trainable, is_leaf=is_encoded)
        begin = Updated(trainable, [stack.before for stack in self.stacks], squares)
        return Visitor(begin, updated_weights, visit)

    def fetch(self, carry: Updated, layer: jax.Array) -> list[Tree]:
        """The state of one layer, copied from host memory."""
        return [stack.read_state(state, layer) for stack, state in zip(self.stacks, carry.states, strict=True)]

    def update_layer(
        self, carry: Updated, layer: jax.Array, grads: Tree, fetched_states: list[Tree] | None = None
    ) -> Updated:
        weights, states, squares = carry
        new_states = list[Tree]()
        for number, (stack, state) in enumerate(zip(self.stacks, states, strict=True)):
            axes = stack.group.axes
            gradient = constrain_tree(select(grads, axes, is_leaf=is_axes), axes, "gradients")
            # One weight after the other, so that the buffers of one update are freed before the next begins.
            gradient, weights, state, new_states = jax.lax.optimization_barrier((gradient, weights, state, new_states))
            stacked = select(weights, axes, is_leaf=is_axes)
            layer_state = fetched_states[number] if fetched_states else stack.read_state(state, layer)
            # Read once: a second read could come after the layer is written, and XLA would copy the stack.
            weight = jax.lax.optimization_barrier(take_layer(stacked, layer))
            new = stack.update(layer, gradient, layer_state, weight)
            stacked, state = stack.put(stacked, state, layer, *new)
            weights = merge(weights, stacked)
            new_states = [*new_states, state]
            sums = jax.tree.map(
                lambda sums_of_layers, g: sums_of_layers.at[layer].set(sum_of_squares(g)),
                select(squares, gradient),
                gradient,
            )
            squares = merge(squares, sums)
        return Updated(weights, new_states, squares)


def add_squares(squares: jax.Array, groups: Sequence[ParameterGroup], grads: Tree) -> jax.Array:
    """`squares` plus the sum of squares of the gradients of one layer."""
    gradients = (
        constrain_tree(select(grads, group.axes, is_leaf=is_axes), group.axes, "gradients") for group in groups
    )
    return sum(map(sum_of_squares, gradients), squares)


class SliceGradient(Protocol):
    def __call__(self, weight: Weight, slices: VocabSlices | None = None, j: jax.Array | None = None, /) -> jax.Array:
        """The gradient of slice j of a matrix; without slices, of the complete matrix."""


@dataclass(frozen=True)
class VocabUpdate:
    """The update of the only matrix in a group of parameters."""

    group: ParameterGroup
    weights: Tree
    state: Tree
    dtype: np.dtype | None = None  # the dtype of the gradient; by default the dtype of the weight
    entries: int | None = None  # vocabulary entries per slice; by default slices have 16 M elements

    def update(self, gradient: SliceGradient, write: Writer, norm: jax.Array | None) -> tuple[Tree, Tree, jax.Array]:
        """Returns new weights, new state and the sum of squares of the gradient."""
        if self._slices is not None and (new := self._update_slices(self._slices, gradient, write, norm)) is not None:
            return new
        grads = self._gradient(gradient, self.weights)
        return *self.group.update_weights(grads, self.state, self.weights, write, norm=norm), sum_of_squares(grads)

    def _update_slices(
        self, slices: VocabSlices, gradient: SliceGradient, write: Writer, norm: jax.Array | None
    ) -> tuple[Tree, Tree, jax.Array] | None:
        """The result of `update`, computed slice by slice. Returns None if the optimizer needs the complete matrix."""

        def update(j: jax.Array, total: SumOverSlices, weights: Tree = self.weights, state: Tree = self.state) -> Tree:
            """Returns the gradient of slice j, its new weights and its new state."""
            dw = self._gradient(gradient, weights, slices, j)
            weight_slice = _read_slice(slices, j, weights, self._axes, self.weights)
            state_slice = _read_slice(slices, j, state, self.group.state_axes, self.state)
            rows = VocabSlice(self._shape, self._vocab_dim, slices.entries(j).reshape(-1), total)
            return dw, *self.group.update_weights(dw, state_slice, weight_slice, write, norm=norm, vocab_slice=rows)

        sums = sliced_sums(update, slices.count)
        if sums is None:
            return None

        def step(j: jax.Array, carried: tuple[Tree, Tree, jax.Array]) -> tuple[Tree, Tree, jax.Array]:
            weights, state, squares = carried
            dw, weight_slice, state_slice = update(j, SlicedSums(sums), weights, state)
            weights = _write_slice(slices, j, weights, self._axes, "weights", weight_slice)
            state = _write_slice(slices, j, state, self.group.state_axes, "optimizer", state_slice)
            return weights, state, squares + sum_of_squares(dw)

        return jax.lax.fori_loop(0, slices.count, step, (self.weights, self.state, jnp.zeros((), jnp.float32)))

    def squares(self, gradient: SliceGradient) -> jax.Array:
        """The sum of squares of the gradient."""
        slices = self._slices
        if slices is None:
            return sum_of_squares(self._gradient(gradient, self.weights))

        def add(j: jax.Array, squares: jax.Array) -> jax.Array:
            return squares + sum_of_squares(self._gradient(gradient, self.weights, slices, j))

        return jax.lax.fori_loop(0, slices.count, add, jnp.zeros((), jnp.float32))

    def _gradient(
        self, gradient: SliceGradient, weights: Tree, slices: VocabSlices | None = None, j: jax.Array | None = None
    ) -> Tree:
        """The gradient of slice j, without slices of the complete matrix, as a tree like `weights`."""
        weight = _only_weight(weights)
        dw = gradient(weight, slices, j).astype(weight.dtype if self.dtype is None else self.dtype)
        like = jax.tree.structure(weights, is_leaf=is_encoded)
        return constrain_tree(jax.tree.unflatten(like, [dw]), self.group.axes, "gradients")

    @property
    def _shape(self) -> tuple[int, ...]:
        return _only_weight(self.weights).shape

    @property
    def _vocab_dim(self) -> int:
        (names,) = jax.tree.leaves(self.group.axes, is_leaf=is_axes)
        return names.index("vocab")

    @property
    def _axes(self) -> Tree:
        return stored_axes(self.group.axes, self.weights)

    @cached_property
    def _slices(self) -> VocabSlices | None:
        arrays = [*_with_axes(self.weights, self._axes), *_with_axes(self.state, self.group.state_axes)]
        sizes = {x.shape[dim] for x, names in arrays if (dim := _dim(names)) is not None}
        vocab = self._shape[self._vocab_dim]
        return even_slices(vocab, self.entries or max(1, SLICE_SIZE * vocab // math.prod(self._shape)), sizes)


def _only_weight(weights: Tree) -> Weight:
    (weight,) = jax.tree.leaves(weights, is_leaf=is_encoded)
    return weight


def _with_axes(tree: Tree, axes: Tree) -> list[tuple[jax.Array, Axes]]:
    return list(zip(jax.tree.leaves(tree), jax.tree.leaves(axes, is_leaf=is_axes), strict=True))


def _dim(names: Axes) -> int | None:
    """The vocabulary dimension of an array."""
    return next((dim for dim, name in enumerate(names) if name and axis_name(name) == "vocab"), None)


def _read_slice(slices: VocabSlices, j: jax.Array, tree: Tree, axes: Tree, unsliced: Tree) -> Tree:
    """A slice of weight or state. Leaves without a vocabulary dimension, e.g. the number of updates, are taken from
    `unsliced`, the tree before the update."""

    def read_leaf(names: Axes, x: jax.Array, before: jax.Array) -> jax.Array:
        return before if (dim := _dim(names)) is None else slices.read(x, dim, j)

    return with_sliced_sizes(jax.tree.map(read_leaf, axes, tree, unsliced, is_leaf=is_axes), tree)


def _write_slice(slices: VocabSlices, j: jax.Array, tree: Tree, axes: Tree, role: Role, new: Tree) -> Tree:
    """Arrays with a slice replaced; arrays without a vocabulary dimension are replaced completely."""

    def write_leaf(x: jax.Array, names: Axes, new: jax.Array) -> jax.Array:
        if (dim := _dim(names)) is None:
            return new
        # The slice is sharded before it is written, so that only this slice is communicated.
        new = constrain(new, *names, role=role)
        written = slices.write(x, dim, j, new)
        return written if is_on_host(written) else constrain(written, *names, role=role)

    leaves = zip(_with_axes(tree, axes), jax.tree.leaves(new), strict=True)
    written = [write_leaf(x, names, new_slice) for (x, names), new_slice in leaves]
    return jax.tree.unflatten(jax.tree.structure(tree), written)
