"""How a leaf of the optimizer state relates to its parameter, which determines its sharding.

A leaf of its parameter's shape is sharded as the parameter is; a scalar is replicated. Any other leaf is wrapped where
it is created, in `Derived(value, dims)`: for each dimension of the value, the dimension of the parameter that it
corresponds to (an int), a logical axis of its own (`"projected"`), or `None`. Factored, projected and block-wise
states all have this form:

    row statistics of [m, n]        Derived(row, (0,))
    projected to rank r, [r, n]     Derived(low, ("projected", 1))
    codes and block scales          Derived(QTensor, (0, 1))

The value may be several arrays of that form, as a QTensor's are. One that is shorter than the parameter along a
dimension (packed codes, block scales) is sharded as the parameter is where the mesh axes divide it; elsewhere it is
replicated along this dimension, and another one is sharded instead. A leaf that is not wrapped is an error, never a
silent replica.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax

from jaxmem.errors import UserError
from jaxmem.sharding.table import Axes, if_even, is_axes
from jaxmem.sharding.weights import is_quantized


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Derived:
    """A state array whose shape is not its parameter's. `dims` numbers the parameter's dimensions without `layer`."""

    value: Any  # an array, or a tree of arrays of as many dimensions
    dims: tuple[int | str | None, ...] = dataclasses.field(metadata={"static": True})


def state_axes(state: Any, params: Any, axes: Any) -> Any:
    """The logical axes of every leaf of an optimizer state, as a tree of the same structure.

    A leaf belongs to the parameter whose path is part of its own path: optax keeps the parameters' tree inside its
    state, whatever wraps it and whatever replaces a parameter.
    """
    weights = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_quantized)
    shapes = {path: leaf.shape for path, leaf in weights}
    names = dict(jax.tree_util.tree_leaves_with_path(axes, is_leaf=is_axes))

    def relate(path: tuple[Any, ...], leaf: Any) -> Any:
        owner = _owner(path, shapes)
        if isinstance(leaf, Derived) and owner:
            return _derived_axes(leaf, names[owner], shapes[owner])
        if leaf.ndim == 0:
            return ()
        if owner and leaf.shape == shapes[owner]:
            return names[owner]
        where = jax.tree_util.keystr(path, simple=True, separator=".")
        raise UserError(
            f"optimizer state {where} of shape {tuple(leaf.shape)} has no known relation to its parameter"
            "; wrap it in jaxmem.sharding.leaves.Derived where it is made"
        )

    return jax.tree_util.tree_map_with_path(relate, state, is_leaf=lambda x: isinstance(x, Derived))


def _owner(path: tuple[Any, ...], shapes: dict[Any, Any]) -> tuple[Any, ...] | None:
    """The longest part of a path that is a parameter's path."""
    spans = ((i, j) for i in range(len(path)) for j in range(len(path), i, -1))
    return max((path[i:j] for i, j in spans if path[i:j] in shapes), key=len, default=None)


def _derived_axes(leaf: Derived, parameter: Axes, shape: tuple[int, ...]) -> Derived:
    stacked = int(parameter[:1] == ("layer",))

    def axis(dim: int | str | None, size: int) -> Any:
        name = parameter[stacked + dim] if isinstance(dim, int) else dim
        full_size = isinstance(dim, int) and size == shape[stacked + dim]
        return name if full_size else if_even(name)

    def axes(x: Any) -> Axes:
        own = tuple(axis(dim, size) for dim, size in zip(leaf.dims, x.shape[stacked:], strict=True))
        return (*parameter[:stacked], *own)

    return dataclasses.replace(leaf, value=jax.tree.map(axes, leaf.value))
