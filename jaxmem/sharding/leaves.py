"""How an array of the optimizer state relates to its parameter, which determines its sharding.

An array with the shape of its parameter is sharded like the parameter, and a scalar is replicated. Any other array is
declared where it is created, by `StateArray(value, dims)`. `dims` has one entry per dimension of the value: the
corresponding dimension of the parameter (an int), another logical axis (`"projected"`), or `None`. Factored, projected
and block-wise states have this form:

    row statistics of [m, n]        StateArray(row, (0,))
    projected to rank r, [r, n]     StateArray(low, ("projected", 1))
    codes, or their block scales    StateArray(codes, (0, 1))

A state contains plain arrays. Their declarations come from the transformation whenever the layout is needed
(`jaxmem.optim.state_axes`), so nothing is lost if another library rebuilds the state from its arrays.

An array that is shorter than the parameter along a dimension (packed codes, block scales) is sharded like the parameter
if that dimension is divisible by the mesh axes; otherwise it is replicated along this dimension and sharded along
another one. An array without a known relation to its parameter is an error, so that none is replicated by mistake.

`per_device` applies a function to the shards of such state.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import PartitionSpec
from jax.tree_util import KeyPath

from jaxmem.errors import UserError
from jaxmem.sharding.arrays import map_devices
from jaxmem.sharding.layout import current
from jaxmem.sharding.table import Axes, if_even, is_axes, is_stacked, path_name, relax_resized
from jaxmem.sharding.weights import is_encoded
from jaxmem.typing import AxesTree, Tree


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StateArray:
    """A declared array of the optimizer state. `dims` counts the parameter's dimensions without `layer`."""

    value: Any  # an array, or a QTensor with as many dimensions
    dims: tuple[int | str | None, ...] = dataclasses.field(metadata={"static": True})


def is_declared(x: object) -> bool:
    return isinstance(x, StateArray)


def axes_of_state(state: Tree, params: Tree, axes: AxesTree) -> AxesTree:
    """The logical axes of every array of an optimizer state, as a tree of the same structure. `state` has the
    declaration of each array (`StateArray`) whose shape differs from its parameter.

    An array belongs to the parameter whose path is part of the path of the array: optax states contain trees with the
    structure of the parameters.
    """
    weights = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_encoded)
    shapes = {path: leaf.shape for path, leaf in weights}
    names = dict(jax.tree_util.tree_leaves_with_path(axes, is_leaf=is_axes))

    def relate(path: KeyPath, leaf: Tree) -> Axes:
        owner = _owner(path, shapes)
        if isinstance(leaf, StateArray) and owner:
            return _declared_axes(leaf, names[owner], shapes[owner])
        if leaf.ndim == 0:
            return ()
        if owner and leaf.shape == shapes[owner]:
            return names[owner]
        raise UserError(
            f"optimizer state {path_name(path)} of shape {tuple(leaf.shape)} has no known relation to its parameter;"
            " write the optimizer as a MatrixRule that declares it with spec.zeros(dims) or spec.state_array(value,"
            " dims), see docs/how-to/own-optimizer.md"
        )

    return jax.tree_util.tree_map_with_path(relate, state, is_leaf=is_declared)


def _owner(path: KeyPath, shapes: dict[KeyPath, Tree]) -> KeyPath | None:
    """The longest part of a path that is the path of a parameter; the last of several."""
    spans = ((i, j) for j in range(len(path), 0, -1) for i in range(j))
    return max((path[i:j] for i, j in spans if path[i:j] in shapes), key=len, default=None)


def _declared_axes(array: StateArray, parameter: Axes, shape: tuple[int, ...]) -> Axes:
    stacked = int(is_stacked(parameter))

    def axis(dim: int | str | None, size: int) -> Any:
        name = parameter[stacked + dim] if isinstance(dim, int) else dim
        full_size = isinstance(dim, int) and size == shape[stacked + dim]
        return name if full_size else if_even(name)

    sizes = array.value.shape[stacked:]
    return (*parameter[:stacked], *(axis(dim, size) for dim, size in zip(array.dims, sizes, strict=True)))


def per_device(function: Callable[..., Any], arrays: Tree, axes: Axes, shape: Sequence[int]) -> Tree:
    """Applies `function(*arrays)` to the shards of each device, for operations that XLA's partitioner does not support.
    Arrays with `len(shape)` dimensions are sharded like optimizer state with these axes. A dimension in which one of
    them (e.g. block scales) is not divisible is replicated, and so are all other arrays."""
    layout = current()
    if layout is None:
        return function(*arrays)
    alike = [x.shape for x in jax.tree.leaves(arrays) if x.ndim == len(shape)]
    least = [min(sizes) for sizes in zip(*alike, strict=True)]
    spec = layout.sharding("optimizer", relax_resized(axes, least, shape), least).spec

    def specs(tree: Tree) -> Tree:
        return jax.tree.map(lambda x: spec if x.ndim == len(shape) else PartitionSpec(), tree)

    results = specs(jax.eval_shape(function, *arrays))
    return map_devices(function, specs(arrays), results)(*arrays)
