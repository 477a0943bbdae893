"""What a leaf of the optimizer's state has to do with its parameter, said once and in one place.

A state leaf of its parameter's shape lies as the parameter does; a scalar is on every device.
Anything else is wrapped where it is made, in `Derived(value, dims)`: for each dimension of
the value, which dimension of the parameter it runs along (an int), a logical axis of its own
(`"rank"`), or nothing (`None`). Factored, projected and block-wise states are all of this form:

    row statistics of [m, n]        Derived(row, (0,))
    projected to rank r, [r, n]     Derived(low, ("rank", 1))
    constants of blocks along m     Derived(absmax, (0, 1))

A leaf that says nothing is an error, never a silent replica.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax

from jaxmem.errors import UserError
from jaxmem.sharding import Axes, is_axes


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Derived:
    """A state array whose shape is not its parameter's. `dims` counts the parameter's dimensions without `layer`."""

    value: Any  # the array, or what stands for it in a tree of the same form
    dims: tuple[int | str | None, ...] = dataclasses.field(metadata={"static": True})


def state_axes(state: Any, params: Any, axes: Any) -> Any:
    """The logical axes of every leaf of an optimizer's state, as a tree of the state's form.

    A leaf belongs to the parameter whose path its own path ends with: optax keeps the parameters' tree
    inside its state, whatever wraps it.
    """
    shapes = {path: leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    names = dict(jax.tree_util.tree_leaves_with_path(axes, is_leaf=is_axes))

    def relate(path: tuple[Any, ...], leaf: Any) -> Any:
        owner = next((path[i:] for i in range(len(path)) if path[i:] in shapes), None)
        if isinstance(leaf, Derived) and owner:
            return dataclasses.replace(leaf, value=_derived_axes(leaf, names[owner]))
        if leaf.ndim == 0:
            return ()
        if owner and leaf.shape == shapes[owner]:
            return names[owner]
        where = jax.tree_util.keystr(path, simple=True, separator=".")
        raise UserError(
            f"optimizer state {where} of shape {tuple(leaf.shape)} does not say how it relates to its parameter"
            "; wrap it in jaxmem.leaves.Derived where it is made"
        )

    return jax.tree_util.tree_map_with_path(relate, state, is_leaf=lambda x: isinstance(x, Derived))


def _derived_axes(leaf: Derived, parameter: Axes) -> Axes:
    stacked = parameter[:1] == ("layer",)
    own = parameter[1:] if stacked else parameter
    axes = tuple(own[d] if isinstance(d, int) else d for d in leaf.dims)
    return ("layer", *axes) if stacked else axes
