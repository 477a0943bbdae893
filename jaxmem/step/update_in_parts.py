"""Updates in parts, so that the device needs memory for the temporary arrays of one part at a time.

`update_from_host`: optimizer state in host memory is copied to the device and back one layer at a time. With P
parameters in N layers and s bytes of state per parameter, a device stores the state of two layers, 2 s P / N bytes,
instead of s P. The host stores s P bytes, and 2 s P bytes per step are sent between host and device (Ren et al.,
arXiv:2101.06840). Frozen weights are copied one layer ahead in each pass (`stack`), and not copied back.

`VocabUpdate`: the gradient of a slice of an embedding or output matrix is computed, and that slice of weight and
optimizer state is updated in place. With V entries of E values and slices of v entries, gradient and update take 2 v E
values instead of 2 V E. If an optimizer needs sums over the complete matrix, each sum takes one more pass over
all slices (`sliced_sums`). A pass recomputes the gradient: for T tokens, 4 T V E FLOPs for an output projection, and
very few for an embedding. State in host memory is copied in the same slices.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem.models.vocab_slices import SLICE_SIZE, VocabSlices, even_slices
from jaxmem.optim import record_norm
from jaxmem.optim.apply import SlicedSums, SumOverSlices, VocabSlice, sliced_sums, sum_of_squares
from jaxmem.optim.groups import (
    ParameterGroup,
    Write,
    constrain_tree,
    merge,
    put_stacked_layer,
    select,
    single_weights,
    take_stacked_layer,
)
from jaxmem.quant import QTensor
from jaxmem.quant.precision import Params
from jaxmem.quant.qtensor import with_sliced_sizes
from jaxmem.sharding import Axes, Role, axis_name, constrain, is_axes, map_layers, shard_count, stored_axes
from jaxmem.sharding.host import fetch_from_host, is_on_host, send_like, take_layer
from jaxmem.sharding.weights import Weight, is_quantized
from jaxmem.step.state import StateSpec
from jaxmem.typing import Tree


class SliceGradient(Protocol):
    def __call__(self, weight: Weight, slices: VocabSlices | None = None, j: jax.Array | None = None, /) -> jax.Array:
        """The gradient of slice j of a matrix; without slices, of the complete matrix."""


class Updated(NamedTuple):
    """Parameters after their update. For a stack it is the carry of the loop over the layers, some of which are updated
    already."""

    weights: Tree
    states: list[Tree]  # of their groups
    squares: Tree  # for each weight the sum of squares of its gradient; of a stack for each layer


@dataclass(frozen=True)
class LayerUpdate:
    """Updates a stack in place from the gradients of one layer at a time."""

    groups: Sequence[ParameterGroup]  # one per weight
    before: Sequence[Tree]  # the state of each group before the update; arrays that are not stacked are read from it
    write: Write
    norm: jax.Array | None
    layers: int  # number of layers of the complete stack
    first: int | jax.Array = 0  # the position of the first updated layer in the complete stack

    def initial_carry(self, weights: Tree, layers: int) -> Updated:
        """The carry before the first update, for a part of `layers` layers."""
        zeros = jax.tree.map(lambda _: jnp.zeros(layers, jnp.float32), weights, is_leaf=is_quantized)
        return Updated(weights, list(self.before), zeros)

    def fetch(self, carry: Updated, layer: jax.Array) -> list[Tree]:
        """The state of one layer, copied from host memory."""
        states = zip(self.groups, carry.states, self.before, strict=True)
        return [take_stacked_layer(state, group.state_axes, layer, old) for group, state, old in states]

    def __call__(self, carry: Updated, layer: jax.Array, grads: Tree, fetched: list[Tree] | None = None) -> Updated:
        """Updates weights one at a time, so that the buffers of one update are freed before the next begins."""
        weights, states, squares = carry
        new_states = list[Tree]()
        for i, (group, state, old) in enumerate(zip(self.groups, states, self.before, strict=True)):
            gradients = constrain_tree(select(grads, group.axes, is_leaf=is_axes), group.axes, "gradients")
            gradients, weights, state, new_states = jax.lax.optimization_barrier(
                (gradients, weights, state, new_states)
            )
            stacked = select(weights, group.axes, is_leaf=is_axes)
            of_layer = fetched[i] if fetched else take_stacked_layer(state, group.state_axes, layer, old)
            # Read once: a second read could come after the layer is written, and XLA would copy the stack.
            weight = jax.lax.optimization_barrier(take_layer(stacked, layer))
            extra = {"layer": self.first + layer, "layers": self.layers, "norm": self.norm}
            new, new_state = group.update(gradients, of_layer, weight, self.write, **extra)
            stacked_axes = stored_axes(group.axes, stacked)
            weights = merge(weights, put_stacked_layer(stacked, stacked_axes, "weights", layer, new))
            new_state = put_stacked_layer(state, group.state_axes, "optimizer", layer, new_state)
            new_states = [*new_states, new_state]
            sums = jax.tree.map(
                lambda sums_of_layers, g: sums_of_layers.at[layer].set(sum_of_squares(g)),
                select(squares, gradients),
                gradients,
            )
            squares = merge(squares, sums)
        return Updated(weights, new_states, squares)


def add_squares(squares: jax.Array, groups: Sequence[ParameterGroup], grads: Tree) -> jax.Array:
    """`squares` plus the sum of squares of the gradients of one layer."""
    gradients = (
        constrain_tree(select(grads, group.axes, is_leaf=is_axes), group.axes, "gradients") for group in groups
    )
    return sum(map(sum_of_squares, gradients), squares)


@dataclass(frozen=True)
class VocabUpdate:
    """The update of the only matrix in a group of parameters."""

    group: ParameterGroup
    weights: Tree
    state: Tree
    dtype: np.dtype | None = None  # the dtype of the gradient; by default the dtype of the weight
    entries: int | None = None  # vocabulary entries per slice; by default slices have 16 M elements

    def update(self, gradient: SliceGradient, write: Write, norm: jax.Array | None) -> tuple[Tree, Tree, jax.Array]:
        """Returns new weights, new state and the sum of squares of the gradient."""
        if self._slices is not None and (new := self._update_slices(self._slices, gradient, write, norm)) is not None:
            return new
        grads = self._gradient(gradient, self.weights)
        weights, state = self.group.update(grads, fetch_from_host(self.state), self.weights, write, norm=norm)
        return weights, send_like(state, self.state), sum_of_squares(grads)

    def _update_slices(
        self, slices: VocabSlices, gradient: SliceGradient, write: Write, norm: jax.Array | None
    ) -> tuple[Tree, Tree, jax.Array] | None:
        """The result of `update`, computed slice by slice. Returns None if the optimizer needs the complete matrix."""

        def update(j: jax.Array, total: SumOverSlices, weights: Tree = self.weights, state: Tree = self.state) -> Tree:
            """Returns the gradient of slice j, its new weights and its new state."""
            dw = self._gradient(gradient, weights, slices, j)
            weight_slice = _read_slice(slices, j, weights, self._axes, self.weights)
            own_state = _read_slice(slices, j, state, self.group.state_axes, self.state)
            vocab_dim = self._names.index("vocab")
            entries = slices.entries(j).reshape(-1)
            rows = VocabSlice(self._weight(self.weights).shape, vocab_dim, entries, total)
            return dw, *self.group.update(dw, own_state, weight_slice, write, norm=norm, vocab_slice=rows)

        sums = sliced_sums(update, slices.count)
        if sums is None:
            return None

        def step(j: jax.Array, carried: tuple[Tree, Tree, jax.Array]) -> tuple[Tree, Tree, jax.Array]:
            weights, state, squares = carried
            dw, weight_slice, own_state = update(j, SlicedSums(sums), weights, state)
            weights = _write_slice(slices, j, weights, self._axes, "weights", weight_slice)
            state = _write_slice(slices, j, state, self.group.state_axes, "optimizer", own_state)
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
        weight = self._weight(weights)
        dw = gradient(weight, slices, j).astype(weight.dtype if self.dtype is None else self.dtype)
        like = jax.tree.structure(weights, is_leaf=is_quantized)
        return constrain_tree(jax.tree.unflatten(like, [dw]), self.group.axes, "gradients")

    def _weight(self, weights: Tree) -> jax.Array | QTensor:
        (weight,) = jax.tree.leaves(weights, is_leaf=is_quantized)
        return weight

    @property
    def _names(self) -> Axes:
        (names,) = jax.tree.leaves(self.group.axes, is_leaf=is_axes)
        return names

    @property
    def _axes(self) -> Tree:
        return stored_axes(self.group.axes, self.weights)

    @cached_property
    def _slices(self) -> VocabSlices | None:
        held = [*_with_axes(self.weights, self._axes), *_with_axes(self.state, self.group.state_axes)]
        sizes = {x.shape[dim] for x, names in held if (dim := _dim(names)) is not None}
        shape = self._weight(self.weights).shape
        vocab = shape[self._names.index("vocab")]
        return even_slices(vocab, self.entries or max(1, SLICE_SIZE * vocab // math.prod(shape)), sizes)


def _with_axes(tree: Tree, axes: Tree) -> list[tuple[jax.Array, Axes]]:
    return list(zip(jax.tree.leaves(tree), jax.tree.leaves(axes, is_leaf=is_axes), strict=True))


def _dim(names: Axes) -> int | None:
    """The vocabulary dimension of an array."""
    return next((dim for dim, name in enumerate(names) if name and axis_name(name) == "vocab"), None)


def _read_slice(slices: VocabSlices, j: jax.Array, tree: Tree, axes: Tree, unsliced: Tree) -> Tree:
    """A slice of weight or state. Leaves without a vocabulary dimension, e.g. the number of updates, are taken from
    `unsliced`, the tree before the update."""

    def read_leaf(names: Axes, x: jax.Array, other: jax.Array) -> jax.Array:
        return other if (dim := _dim(names)) is None else slices.read(x, dim, j)

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

    done = [
        write_leaf(x, names, new) for (x, names), new in zip(_with_axes(tree, axes), jax.tree.leaves(new), strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(tree), done)


def update_from_host(
    spec: StateSpec, params: Params, grads: Params, opt_state: Tree, write: Write, norm: jax.Array
) -> tuple[Params, Tree]:
    """Returns new parameters and optimizer state. The state of the next layer is copied while a layer is updated. The
    arguments are those of `update_singly`, with all trainable parameters."""
    new, states = update_singly(spec, params, grads, opt_state, write, norm)
    return merge(params, *new), record_norm(merge(opt_state, *states), norm)


def update_singly(
    spec: StateSpec, params: Params, grads: Params, opt_state: Tree, write: Write, norm: jax.Array | None
) -> tuple[list[Tree], list[Tree]]:
    """Updates parameters one after the other, and a stack layer by layer.

    Args:
        spec: the specification of the step.
        params: the parameters to update.
        grads: their gradients.
        opt_state: the state of the optimizer.
        write: adds updates to weights.
        norm: the norm of all gradients; None: the optimizer does not need it.

    Returns:
        The new value of each parameter, and the new state of its group.
    """
    new_params = []
    new_states = []
    for weight in single_weights(params):
        group = spec.group(weight)
        gradient = select(grads, group.axes, is_leaf=is_axes)
        state = group.state(opt_state)
        (names,) = jax.tree.leaves(group.axes, is_leaf=is_axes)
        (g,) = jax.tree.leaves(gradient)
        if names[:1] == ("layer",):
            new, state = _layer_by_layer(group, gradient, state, weight, write, norm)
        elif "vocab" in names:
            slice_of = partial(_slice_of, g, names.index("vocab"))
            new, state, _ = VocabUpdate(group, weight, state, g.dtype).update(slice_of, write, norm)
        else:
            new, state = group.update(gradient, state, weight, write, norm=norm)
        new_params.append(new)
        new_states.append(state)
    return new_params, new_states


def _slice_of(
    gradient: jax.Array, dim: int, _: Weight, slices: VocabSlices | None = None, j: jax.Array | None = None, /
) -> jax.Array:
    return gradient if slices is None or j is None else slices.read(gradient, dim, j)


def _layer_by_layer(
    group: ParameterGroup, grads: Tree, state: Tree, weights: Tree, write: Write, norm: jax.Array | None
) -> tuple[Tree, Tree]:
    layers = jax.tree.leaves(weights)[0].shape[0]
    stages = shard_count("weights", "layer")
    stages = 1 if layers % stages else stages  # a stack that is not divisible is outside of the pipeline: replicated

    def update(grads: Tree, state: Tree, weights: Tree, norm: jax.Array | None, first: jax.Array) -> tuple[Tree, Tree]:
        """Updates the layers of a pipeline stage."""
        initial_state = state  # each layer reads the number of earlier updates here
        last = layers // stages - 1

        def fetch(state: Tree, layer: jax.Array) -> Tree:
            return take_stacked_layer(state, group.state_axes, layer, initial_state)

        def step(layer: jax.Array, carry: tuple[Tree, Tree, Tree]) -> tuple[Tree, Tree, Tree]:
            weights, state, fetched = carry
            ahead = fetch(state, jnp.minimum(layer + 1, last))
            extra = {"layer": first[0] + layer, "layers": layers, "norm": norm}
            of_layer = take_layer(grads, layer), fetched, take_layer(weights, layer)
            new, new_state = group.update(*of_layer, write, **extra)
            # The next layer's state is read before the state is overwritten; otherwise XLA would copy all of the state.
            ahead, state = jax.lax.optimization_barrier((ahead, state))
            weights = put_stacked_layer(weights, stored, "weights", layer, new)
            return weights, put_stacked_layer(state, group.state_axes, "optimizer", layer, new_state), ahead

        begin = weights, state, fetch(state, jnp.int32(0))
        weights, state, _ = jax.lax.fori_loop(0, last + 1, step, begin)
        return weights, state

    stored = stored_axes(group.axes, weights)
    axes = group.axes, group.state_axes, stored, (), ("layer",)
    run = update if stages == 1 else map_layers(update, axes, (stored, group.state_axes))
    return run(grads, state, weights, norm, jnp.arange(stages, dtype=jnp.int32) * (layers // stages))
