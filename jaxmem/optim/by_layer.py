"""An optimizer is written for one matrix; here it is applied to every layer of a stack, one after the other.

A weight [layer, m, n] is a stack of matrices, and what an optimizer says of a matrix (its rank, its rows, its norm) is
said of each of them. `by_layer` makes an optax transformation of such a rule. It loops over the layers and writes
each layer's state and update where the old state and the gradient were, so that beside the state and the gradients
no more than one layer is ever held in float32, whatever form the state is kept in.

In a loop of your own, name the dimensions of stacked weights: `axes` is a tree like the parameters', a tuple of names
for each, `("layer", None, None)` for a stack of matrices. Without `axes` nothing is a stack. Names that matter are
`layer`, and `vocab` for what is no hidden matrix: embeddings and the output projection.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from jaxmem.optim.apply import leaf_key
from jaxmem.optim.in_turn import in_parts, layers_in_turn
from jaxmem.optim.piece import IndivisibleError, Piece
from jaxmem.sharding import Axes, constrain, is_axes
from jaxmem.sharding.leaves import Derived
from jaxmem.sharding.weights import is_quantized


@dataclass(frozen=True)
class Leaf:
    """What a rule knows of a weight, or of one layer of it, before there are values."""

    shape: tuple[int, ...]
    dtype: Any
    axes: Axes  # logical names, None where there is none
    dims: tuple[int | str | None, ...]  # which of the parameter's dimensions these are, as `Derived` counts them

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def is_hidden_matrix(self) -> bool:
        """Neither a vector nor a table with a row or column for each token."""
        return len(self.shape) == 2 and "vocab" not in self.axes

    def keep(self, value: Any, dims: tuple[int, ...] | None = None) -> Derived:
        """State that runs along these dimensions of the leaf, by default all."""
        own = self.dims if dims is None else tuple(self.dims[d] for d in dims)
        return Derived(value, own)

    def zeros(self, dims: tuple[int, ...] | None = None, dtype: DTypeLike = jnp.float32) -> Derived:
        over = range(len(self.shape)) if dims is None else dims
        return self.keep(jnp.zeros([self.shape[d] for d in over], dtype), dims)


@dataclass(frozen=True)
class At:
    """Where an update takes place."""

    weight: Any  # an array, or a QTensor
    leaf: Leaf
    count: jax.Array  # updates, this one included: 1 at the first
    layer: jax.Array  # which one of the stack
    layers: int
    key: jax.Array  # the same at every update; this layer's own
    piece: Piece | None = None  # of a table of which only some entries are at hand

    def sums(self, *asked: tuple[jax.Array, int | None]) -> tuple[jax.Array, ...]:
        """Of each array the sum over a dimension of the matrix, None: over all, also where the matrix comes in pieces.
        Each call is then one more time that a table is gone through."""
        own = [jnp.sum(x, axis=dim) for x, dim in asked]
        if self.piece is None:
            return tuple(own)
        over = [i for i, (_, dim) in enumerate(asked) if dim in (None, self.piece.dim)]
        total = dict(zip(over, self.piece.total([own[i] for i in over]), strict=True))
        return tuple(total.get(i, x) for i, x in enumerate(own))


class Rule(Protocol):
    """An optimizer of one matrix (or vector, or scalar). One that does with a number what it does with any other may
    say `in_parts = True`: it then sees a few rows at a time, and no weight."""

    def init(self, leaf: Leaf) -> dict[str, Any]:
        """Trees of `Derived`, by name."""

    def divides(self, dim: int, /) -> bool:
        """Whether entries along a dimension can be updated by themselves, with `At.sums` for sums over all."""

    def update(self, g: jax.Array, state: dict[str, Any], at: At, /) -> tuple[jax.Array, dict[str, Any]]:
        """The update before weight decay and learning rate, in any dtype, and the new state. Of `state` the rule
        sees the values inside `Derived`."""


class ByLayerState(NamedTuple):
    step: jax.Array  # updates so far
    leaves: Any  # at each parameter's place what its rule keeps


def by_layer(
    rule_for: Callable[[Leaf], Rule], axes: Any = None, *, seed: int = 0
) -> optax.GradientTransformationExtraArgs:
    """An optax transformation of one rule for each kind of leaf. Costs no memory beside the rules' own state.

    `update(..., layer=i, layers=n)`: gradients, state and parameters are those of layer i of n alone. `update(...,
    piece=p)`: of the one table that there is, those of some entries.
    """

    def named(params: Any) -> Any:
        if axes is None:
            return jax.tree.map(lambda w: (None,) * w.ndim, params, is_leaf=is_quantized)
        return axes

    def init(params: Any) -> ByLayerState:
        def make(names: Axes, w: Any) -> dict[str, Any]:
            leaf, layers = _one_layer(names, w)
            if leaf.size == 0:
                return {}
            return jax.tree.map(lambda x: jnp.broadcast_to(x, (*layers, *x.shape)), rule_for(leaf).init(leaf))

        made = jax.tree.map(make, named(params), params, is_leaf=is_axes)
        return ByLayerState(jnp.zeros((), jnp.int32), made)

    def update(
        grads: Any,
        state: ByLayerState,
        params: Any = None,
        *,
        layer: jax.Array | None = None,
        layers: int = 1,
        piece: Piece | None = None,
        **_: Any,
    ) -> tuple[Any, ByLayerState]:
        count = optax.safe_increment(state.step)
        names, treedef = _flat(named(grads if params is None else params))
        weights = treedef.flatten_up_to(grads if params is None else params)
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(grads)]
        done = [
            _update_leaf(rule_for, *one, count, jax.random.key(seed), layer, layers, piece)
            for one in zip(
                paths, names, treedef.flatten_up_to(grads), treedef.flatten_up_to(state.leaves), weights, strict=True
            )
        ]
        updates, leaves = (jax.tree.unflatten(treedef, part) for part in zip(*done, strict=True))
        return updates, ByLayerState(count, leaves)

    return optax.GradientTransformationExtraArgs(init, update)


def _update_leaf(
    rule_for: Callable[[Leaf], Rule],
    path: Any,
    names: Axes,
    g: jax.Array,
    state: Any,
    w: Any,
    count: jax.Array,
    key: jax.Array,
    alone: jax.Array | None,
    of: int,
    piece: Piece | None,
) -> tuple[jax.Array, Any]:
    stacked = names[:1] == ("layer",)
    if stacked and alone is not None:
        names, stacked = names[1:], False
    leaf, layers = _one_layer(names, w)
    if leaf.size == 0:
        return g, state
    if piece is not None:
        leaf = dataclasses.replace(leaf, shape=piece.shape)
    rule = rule_for(leaf)
    if piece is not None and not rule.divides(piece.dim):
        raise IndivisibleError
    # A leaf's key follows from its name alone, so that it is the same on every mesh and in every order.
    key = leaf_key(key, path)

    def one(mine: tuple[jax.Array, Any], w: Any, i: jax.Array, _: Any = None) -> tuple[jax.Array, Any]:
        g, state = mine
        at = At(w, leaf, count, i, of if alone is not None else math.prod(layers), jax.random.fold_in(key, i), piece)
        values = jax.tree.map(lambda x: x.value, state, is_leaf=_is_derived)
        u, new = rule.update(_placed(g, leaf), values, at)
        kept = jax.tree.map(lambda x, value: dataclasses.replace(x, value=value), state, new, is_leaf=_is_derived)
        return _placed(u.astype(g.dtype), leaf), kept

    if stacked and getattr(rule, "takes_stacks", False):
        leaf = dataclasses.replace(leaf, shape=w.shape, axes=names)
        return one((g, state), w, jnp.zeros((), jnp.int32))
    if getattr(rule, "in_parts", False):
        return in_parts(one, (g, state), None, names)
    if stacked:
        return layers_in_turn(one, (g, state), w)
    return one((g, state), w, jnp.zeros((), jnp.int32) if alone is None else alone)


def _flat(axes: Any) -> tuple[list[Axes], Any]:
    return jax.tree.flatten(axes, is_leaf=is_axes)


def _one_layer(names: Axes, w: Any) -> tuple[Leaf, tuple[int, ...]]:
    """One layer of a weight, and how many there are: () where it is no stack."""
    stacked = int(names[:1] == ("layer",))
    shape = w.shape[stacked:]
    return Leaf(shape, w.dtype, names[stacked:], tuple(range(len(shape)))), w.shape[:stacked]


def _placed(x: jax.Array, leaf: Leaf) -> jax.Array:
    """One layer where the optimizer's state of it lies: nothing is then gathered to be updated."""
    return constrain(x, *leaf.axes, role="optimizer") if any(leaf.axes) else x


def _is_derived(x: Any) -> bool:
    return isinstance(x, Derived)
