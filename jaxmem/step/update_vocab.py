"""The update of an embedding or output matrix in slices of its vocabulary.

The gradient of a slice is computed, and that slice of weight and optimizer state is updated in place. With V entries of
E values and slices of v entries, gradient and update take 2 v E values instead of 2 V E. If an optimizer needs sums
over the complete matrix, each sum takes one more pass over all slices (`sliced_sums`). A pass recomputes the gradient:
for T tokens, 4 T V E FLOPs for an output projection, and very few for an embedding. State in host memory is copied in
the same slices.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem.models.vocab_slices import SLICE_SIZE, VocabSlices, even_slices
from jaxmem.optim.apply import SlicedSums, SumOverSlices, VocabSlice, Writer, sliced_sums, sum_of_squares
from jaxmem.optim.groups import ParameterGroup, constrain_tree
from jaxmem.quant import QTensor
from jaxmem.quant.qtensor import with_sliced_sizes
from jaxmem.sharding.arrays import constrain
from jaxmem.sharding.gathering import stored_axes
from jaxmem.sharding.host import is_on_host
from jaxmem.sharding.table import Axes, Role, axis_name, is_axes
from jaxmem.sharding.weights import Weight, is_encoded
from jaxmem.typing import Tree


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
        return *self.group.update(grads, self.state, self.weights, write, norm=norm), sum_of_squares(grads)

    def _update_slices(
        self, slices: VocabSlices, gradient: SliceGradient, write: Writer, norm: jax.Array | None
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
        like = jax.tree.structure(weights, is_leaf=is_encoded)
        return constrain_tree(jax.tree.unflatten(like, [dw]), self.group.axes, "gradients")

    def _weight(self, weights: Tree) -> jax.Array | QTensor:
        (weight,) = jax.tree.leaves(weights, is_leaf=is_encoded)
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
