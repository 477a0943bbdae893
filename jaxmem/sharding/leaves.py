"""How a leaf of the optimizer state relates to its parameter, which determines its sharding.

A leaf with the shape of its parameter is sharded like the parameter, and a scalar is replicated. Any other leaf is
wrapped in `Derived(value, dims)` where it is created. `dims` has one entry per dimension of the value: the
corresponding dimension of the parameter (an int), another logical axis (`"projected"`), or `None`. Factored, projected
and block-wise states have this form:

    row statistics of [m, n]        Derived(row, (0,))
    projected to rank r, [r, n]     Derived(low, ("projected", 1))
    codes and block scales          Derived(QTensor, (0, 1))

The value may be a tree of such arrays, e.g. a QTensor. An array that is shorter than the parameter along a dimension
(packed codes, block scales) is sharded like the parameter if that dimension is divisible by the mesh axes; otherwise it
is replicated along this dimension and sharded along another one. A leaf that is not wrapped is an error, so that no
array is replicated by mistake.

`per_device` and `map_shards` apply functions to the shards of such state.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxmem.errors import UserError
from jaxmem.sharding.arrays import map_devices
from jaxmem.sharding.layout import current
from jaxmem.sharding.table import Axes, if_even, is_axes, path_name, relax_resized
from jaxmem.sharding.weights import is_quantized


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Derived:
    """A state array whose shape differs from its parameter. `dims` counts the parameter's dimensions without
    `layer`."""

    value: Any  # an array, or a tree of arrays with as many dimensions
    dims: tuple[int | str | None, ...] = dataclasses.field(metadata={"static": True})


def state_axes(state: Any, params: Any, axes: Any) -> Any:
    """The logical axes of every leaf of an optimizer state, as a tree of the same structure.

    A leaf belongs to the parameter whose path is part of the path of the leaf: optax states contain trees with the
    structure of the parameters.
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
        raise UserError(
            f"optimizer state {path_name(path)} of shape {tuple(leaf.shape)} has no known relation to its parameter"
            "; wrap it in jaxmem.sharding.leaves.Derived where it is made"
        )

    return jax.tree_util.tree_map_with_path(relate, state, is_leaf=lambda x: isinstance(x, Derived))


def _owner(path: tuple[Any, ...], shapes: dict[Any, Any]) -> tuple[Any, ...] | None:
    """The longest part of a path that is the path of a parameter."""
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


def map_shards(function: Callable[..., Any], over: tuple[str, ...], *arrays: Any) -> Any:
    """Applies `function(*arrays)` to each shard of the first dimension over these mesh axes. There is no communication
    along these axes, so the shards may take different branches of a `cond`. The partitioner handles the other axes."""
    layout = current()
    if layout is None:
        return function(*arrays)
    spec = PartitionSpec(over)
    return map_devices(function, spec, spec, over=over)(*arrays)


def per_device(function: Callable[..., Any], arrays: Any, axes: Axes, shape: Sequence[int]) -> Any:
    """Applies `function(*arrays)` to the shards of each device, for operations that XLA's partitioner does not support.
    Arrays with `len(shape)` dimensions are sharded like optimizer state with these axes. A dimension in which one of
    them (e.g. block scales) is not divisible is replicated, and so are all other arrays."""
    layout = current()
    if layout is None:
        return function(*arrays)
    alike = [x.shape for x in jax.tree.leaves(arrays) if x.ndim == len(shape)]
    least = [min(sizes) for sizes in zip(*alike, strict=True)]
    own = layout.sharding("optimizer", relax_resized(axes, least, shape), least).spec

    def specs(tree: Any) -> Any:
        return jax.tree.map(lambda x: own if x.ndim == len(shape) else PartitionSpec(), tree)

    results = specs(jax.eval_shape(function, *arrays))
    return map_devices(function, specs(arrays), results)(*arrays)
