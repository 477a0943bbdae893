"""What a leaf of the optimizer's state has to do with its parameter, said once and in one place.

A state leaf of its parameter's shape lies as the parameter does; a scalar is on every device.
Anything else is wrapped where it is made, in `Derived(value, dims)`: for each dimension of
the value, which dimension of the parameter it runs along (an int), a logical axis of its own
(`"projected"`), or nothing (`None`). Factored, projected and block-wise states are all of this form:

    row statistics of [m, n]        Derived(row, (0,))
    projected to rank r, [r, n]     Derived(low, ("projected", 1))
    codes and constants of blocks   Derived(QTensor, (0, 1))

The value may be several arrays of that form, as a QTensor's are. One that is shorter than the parameter along a
dimension (packed codes, constants of blocks) is split as the parameter is where that comes out even; where the mesh
cuts between it is whole along it, and another dimension is split in its place. A leaf that says nothing is an error,
never a silent replica.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax

from jaxmem.errors import UserError
from jaxmem.sharding import IF_EVEN, Axes, is_axes
from jaxmem.sharding.weights import is_quantized


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Derived:
    """A state array whose shape is not its parameter's. `dims` counts the parameter's dimensions without `layer`."""

    value: Any  # an array, or a tree of arrays of as many dimensions
    dims: tuple[int | str | None, ...] = dataclasses.field(metadata={"static": True})


def state_axes(state: Any, params: Any, axes: Any) -> Any:
    """The logical axes of every leaf of an optimizer's state, as a tree of the state's form.

    A leaf belongs to the parameter whose path is in its own path: optax keeps the parameters' tree inside its state,
    whatever wraps it and whatever stands in a parameter's place.
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
            f"optimizer state {where} of shape {tuple(leaf.shape)} does not say how it relates to its parameter"
            "; wrap it in jaxmem.sharding.leaves.Derived where it is made"
        )

    return jax.tree_util.tree_map_with_path(relate, state, is_leaf=lambda x: isinstance(x, Derived))


def _owner(path: tuple[Any, ...], shapes: dict[Any, Any]) -> tuple[Any, ...] | None:
    """The longest part of a path that is a parameter's."""
    spans = ((i, j) for i in range(len(path)) for j in range(len(path), i, -1))
    return max((path[i:j] for i, j in spans if path[i:j] in shapes), key=len, default=None)


def _derived_axes(leaf: Derived, parameter: Axes, shape: tuple[int, ...]) -> Derived:
    stacked = int(parameter[:1] == ("layer",))

    def axis(dim: int | str | None, size: int) -> str | None:
        name = parameter[stacked + dim] if isinstance(dim, int) else dim
        even = isinstance(dim, int) and size == shape[stacked + dim]
        return name if name is None or even else name + IF_EVEN

    def axes(x: Any) -> Axes:
        own = tuple(axis(dim, size) for dim, size in zip(leaf.dims, x.shape[stacked:], strict=True))
        return (*parameter[:stacked], *own)

    return dataclasses.replace(leaf, value=jax.tree.map(axes, leaf.value))
