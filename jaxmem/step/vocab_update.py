"""Updating an embedding or output matrix in slices: the gradient of a slice is computed, and that slice of weight and
optimizer state is updated in place.

With V entries of E values and slices of v entries, gradient and update take 2 v E values instead of 2 V E. If an
optimizer sums over the complete matrix, each sum that depends on another one needs one more pass over all slices
(`optim.vocab_slice`), which recomputes the gradient: 4 T V E FLOPs for an output projection and T tokens, very few for
looked-up rows. State in host memory is copied in the same slices.
"""

import dataclasses
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem.models.vocab_slices import SLICE_SIZE, VocabSlices, even_slices
from jaxmem.optim.apply import apply_updates, global_norm
from jaxmem.optim.groups import ParameterGroup, Write, constrain_tree
from jaxmem.optim.vocab_slice import SlicedSums, Total, VocabSlice, sliced_sums
from jaxmem.quant import QTensor
from jaxmem.sharding import Axes, Role, axis_name, constrain, is_axes, stored_axes
from jaxmem.sharding.host import fetch_from_host, is_on_host, send_like
from jaxmem.sharding.weights import is_quantized
from jaxmem.step.segments import SliceGradient

Tree = Any


@dataclass(frozen=True)
class VocabUpdate:
    """The update of the only matrix in a group of parameters."""

    part: ParameterGroup
    weights: Tree
    state: Tree
    dtype: np.dtype | None = None  # of the gradient; None: the dtype of the weight
    entries: int | None = None  # per slice; None: 16 M values

    def update(self, gradient: SliceGradient, write: Write, norm: jax.Array | None) -> tuple[Tree, Tree, jax.Array]:
        """Returns new weights, new state and the sum of squares of the gradient."""
        slices = self._slices
        known = None if slices is None else self._totals(gradient, slices, norm)
        if slices is None or known is None:
            grads = self._gradient(gradient, self.weights)
            new, kept = self.part.update(grads, fetch_from_host(self.state), self.weights, write, norm=norm)
            return new, send_like(kept, self.state), _squares(grads)

        def step(j: jax.Array, carried: tuple[Tree, Tree, jax.Array]) -> tuple[Tree, Tree, jax.Array]:
            weights, state, squares = carried
            dw = self._gradient(gradient, weights, slices, j)
            own, kept = self._slice(slices, j, weights, state)
            vocab_slice = self._vocab_slice(slices, j, SlicedSums(known))
            own, kept = self.part.update(dw, kept, own, write, norm=norm, vocab_slice=vocab_slice)
            weights = _written(slices, j, weights, self._axes, "weights", own)
            return weights, _written(slices, j, state, self.part.state_axes, "optimizer", kept), squares + _squares(dw)

        return jax.lax.fori_loop(0, slices.count, step, (self.weights, self.state, jnp.zeros((), jnp.float32)))

    def squares(self, gradient: SliceGradient) -> jax.Array:
        """The sum of squares of the gradient."""
        slices = self._slices
        if slices is None:
            return _squares(self._gradient(gradient, self.weights))

        def add(j: jax.Array, squares: jax.Array) -> jax.Array:
            return squares + _squares(self._gradient(gradient, self.weights, slices, j))

        return jax.lax.fori_loop(0, slices.count, add, jnp.zeros((), jnp.float32))

    def _totals(self, gradient: SliceGradient, slices: VocabSlices, norm: jax.Array | None) -> list[Any] | None:
        def update(j: jax.Array, total: Total) -> None:
            dw = self._gradient(gradient, self.weights, slices, j)
            own, kept = self._slice(slices, j, self.weights, self.state)
            self.part.update(dw, kept, own, apply_updates, norm=norm, vocab_slice=self._vocab_slice(slices, j, total))

        return sliced_sums(update, slices.count)

    def _vocab_slice(self, slices: VocabSlices, j: jax.Array, total: Total) -> VocabSlice:
        return VocabSlice(
            self._weight(self.weights).shape, self._names.index("vocab"), slices.entries(j).reshape(-1), total
        )

    def _slice(self, slices: VocabSlices, j: jax.Array, weights: Tree, state: Tree) -> tuple[Tree, Tree]:
        """A slice of weight and state. Leaves without a vocabulary dimension, e.g. the number of updates, have their
        values from before the update."""
        own = _read(slices, j, weights, self._axes, self.weights)
        return own, _read(slices, j, state, self.part.state_axes, self.state)

    def _gradient(self, gradient: SliceGradient, weights: Tree, *which: Any) -> Tree:
        weight = self._weight(weights)
        dw = gradient(weight, *which).astype(weight.dtype if self.dtype is None else self.dtype)
        like = jax.tree.structure(weights, is_leaf=is_quantized)
        return constrain_tree(jax.tree.unflatten(like, [dw]), self.part.axes, "gradients")

    def _weight(self, weights: Tree) -> jax.Array | QTensor:
        (weight,) = jax.tree.leaves(weights, is_leaf=is_quantized)
        return weight

    @property
    def _names(self) -> Axes:
        (names,) = jax.tree.leaves(self.part.axes, is_leaf=is_axes)
        return names

    @property
    def _axes(self) -> Tree:
        return stored_axes(self.part.axes, self.weights)

    @cached_property
    def _slices(self) -> VocabSlices | None:
        held = [*_with_axes(self.weights, self._axes), *_with_axes(self.state, self.part.state_axes)]
        sizes = {x.shape[dim] for x, names in held if (dim := _dim(names)) is not None}
        shape = self._weight(self.weights).shape
        vocab = shape[self._names.index("vocab")]
        return even_slices(vocab, self.entries or max(1, SLICE_SIZE * vocab // math.prod(shape)), sizes)


def _with_axes(tree: Tree, axes: Tree) -> list[tuple[jax.Array, Axes]]:
    return list(zip(jax.tree.leaves(tree), jax.tree.leaves(axes, is_leaf=is_axes), strict=True))


def _dim(names: Axes) -> int | None:
    """The vocabulary dimension of an array."""
    return next((dim for dim, name in enumerate(names) if name and axis_name(name) == "vocab"), None)


def _read(slices: VocabSlices, j: jax.Array, tree: Tree, axes: Tree, rest: Tree) -> Tree:
    own = [
        other if (dim := _dim(names)) is None else slices.read(x, dim, j)
        for (x, names), other in zip(_with_axes(tree, axes), jax.tree.leaves(rest), strict=True)
    ]
    cut = jax.tree.unflatten(jax.tree.structure(tree), own)
    return jax.tree.map(_resized, cut, tree, is_leaf=lambda x: isinstance(x, QTensor))


def _resized(new: Any, old: Any) -> Any:
    """A slice of a quantized array, with the size of the slice."""
    if not isinstance(new, QTensor):
        return new
    size = old.size * new.codes.shape[new.axis] // old.codes.shape[old.axis]
    return dataclasses.replace(new, size=size, scale=_resized(new.scale, old.scale))


def _written(slices: VocabSlices, j: jax.Array, tree: Tree, axes: Tree, role: Role, new: Tree) -> Tree:
    """Arrays with a slice replaced; arrays without a vocabulary dimension are replaced completely."""

    def one(x: jax.Array, names: Axes, new: jax.Array) -> jax.Array:
        if (dim := _dim(names)) is None:
            return new
        # Sharded before it is written, so that only this slice is communicated.
        new = constrain(new, *names, role=role)
        whole = slices.write(x, dim, j, new)
        return whole if is_on_host(whole) else constrain(whole, *names, role=role)

    done = [one(x, names, new) for (x, names), new in zip(_with_axes(tree, axes), jax.tree.leaves(new), strict=True)]
    return jax.tree.unflatten(jax.tree.structure(tree), done)


def _squares(grads: Tree) -> jax.Array:
    return jnp.square(global_norm(grads))
