"""Loops that update a stack layer by layer, or a matrix some rows at a time, in place."""

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from jaxmem.quant import FORMATS, QTensor
from jaxmem.quant.formats import values_per_group
from jaxmem.quant.qtensor import with_sliced_sizes
from jaxmem.sharding.arrays import constrain, map_layers, row_major_if_gathered
from jaxmem.sharding.layout import current
from jaxmem.sharding.table import Axes, is_axes, is_stacked
from jaxmem.sharding.weights import is_encoded
from jaxmem.typing import AxesTree, Tree

Grid = dict[int, int]  # dimension -> number of parts
LayerFunction = Callable[[Tree, Tree, jax.Array], Tree]  # (one or several layers, read_only, first index) -> new
PartFunction = Callable[[Tree, Tree, jax.Array, jax.Array], Tree]  # (part, part of read_only, layer, index) -> new part

PART_SIZE = 1 << 23  # elements that a device dequantizes at once


def update_parts(grid: Grid, function: Callable[[Tree, jax.Array], Tree], arrays: Tree) -> Tree:
    """Divides arrays by a grid, and overwrites each part with `function(part, index)`.

    Each iteration writes its part, then reads the next part and passes it on in the carry. If an iteration read its
    own part for several uses, one of which might follow the write, XLA would copy the complete arrays.
    """
    count = math.prod(grid.values())

    def step(i: jax.Array, carried: tuple[Tree, Tree]) -> tuple[Tree, Tree]:
        arrays, part = carried
        arrays = jax.tree.map(lambda x, new: _write(grid, x, new, i), arrays, function(part, i))
        return arrays, jax.tree.map(lambda x: _read(grid, x, jnp.minimum(i + 1, count - 1)), arrays)

    first = jax.tree.map(lambda x: _read(grid, x, jnp.zeros((), jnp.int32)), arrays)
    return jax.lax.fori_loop(0, count, step, (arrays, first))[0]


def update_layers(function: LayerFunction, stack: Tree, read_only: Tree, axis: str = "layer") -> Tree:
    """Replaces every layer of a stack, in place.

    Args:
        function: (layer, layer of `read_only`, index) -> new layer.
        stack: a tree of stacked arrays.
        read_only: another one, which stays as it is.
        axis: the logical axis of the first dimension: `layer`, or `expert` for the matrices of a layer.
    """

    def loop(stack: Tree, read_only: Tree, first: jax.Array) -> Tree:
        def step(arrays: Tree, i: jax.Array) -> Tree:
            return function(arrays, jax.tree.map(lambda x: _read(grid, x, i), read_only), first + i)

        grid = {0: jax.tree.leaves(stack)[0].shape[0]}
        return update_parts(grid, step, stack)

    return _per_shard(loop, stack, read_only, axis)


def gather_in_place(old: Tree, new: Tree, axes: AxesTree) -> Tree:
    """The new weights, sharded like stored weights. `axes`: the axes of the arrays of both trees. If each device has
    updated a smaller shard than it stores (ZeRO 1 and 2; ZeRO 3 with `rules.optimizer`), one layer of every stack at a
    time is gathered and written over the old weights, so that no device stores the old and the new weights together.
    """
    layout = current()
    if layout is None:
        return new
    names = jax.tree.leaves(axes, is_leaf=is_axes)
    arrays = jax.tree.leaves(old)
    done, form = jax.tree.flatten(new)
    stacks = defaultdict[int, list[int]](list)  # number of layers -> the arrays to gather
    for number, leaf_axes in enumerate(names):
        is_gathered = layout.mesh_axes_each("optimizer", leaf_axes) != layout.mesh_axes_each("weights", leaf_axes)
        if is_stacked(leaf_axes) and is_gathered:
            stacks[len(arrays[number])].append(number)
    for numbers in stacks.values():
        gather = partial(_gather_layer, [names[number][1:] for number in numbers])
        stack = update_layers(gather, [arrays[number] for number in numbers], [done[number] for number in numbers])
        for number, array in zip(numbers, stack, strict=True):
            done[number] = array
    return jax.tree.unflatten(form, done)


def _gather_layer(axes: list[Axes], _: Tree, shards: list[jax.Array], __: jax.Array) -> list[jax.Array]:
    layer = [constrain(shard, *leaf_axes, role="weights") for leaf_axes, shard in zip(axes, shards, strict=True)]
    return [
        row_major_if_gathered(x, leaf_axes, "weights", "optimizer") for leaf_axes, x in zip(axes, layer, strict=True)
    ]


def _per_shard(
    loop: Callable[[Tree, Tree, jax.Array], Tree], stack: Tree, read_only: Tree, axis: str = "layer"
) -> Tree:
    """Runs `loop(layers, layers of read_only, index of the first layer)` on a stack. With pipeline parallelism there is
    one loop per stage, with its own conditionals: under `jax.vmap`, all stages would execute the branches of each."""
    layers = jax.tree.leaves(stack)[0].shape[0]
    return map_layers(loop, layers, ((axis,), (axis,)), (axis,), axis)(stack, read_only)


def update_rows(function: PartFunction, matrix: Tree, read_only: Tree, axes: Axes, dim: int = 0) -> Tree:
    """Applies `function` to some rows of a matrix at a time, in place, so that no device dequantizes more than 8 M
    elements at once. A stack of matrices is one loop over the parts of all layers.

    Args:
        function: computes the new part.
        matrix: a tree of arrays and QTensors that have the same shape, and blocks along one dimension.
        read_only: a tree like `matrix`, of which `function` receives the same rows.
        axes: their logical axes.
        dim: the dimension of rows in a matrix; in a stack it is one more.

    Returns:
        The new `matrix`.
    """
    zero = jnp.zeros((), jnp.int32)
    division = _division((matrix, read_only), axes, dim)
    is_stack = is_stacked(axes)
    if division is None:
        update_matrix = lambda part, read_only, layer: function(part, read_only, layer, zero)  # noqa: E731
        return update_layers(update_matrix, matrix, read_only) if is_stack else update_matrix(matrix, read_only, zero)
    update = partial(_update_divided, function, division)
    return _per_shard(update, matrix, read_only) if is_stack else update(matrix, read_only, zero)


@dataclass(frozen=True)
class Division:
    """The parts of a matrix, or of each matrix of a stack. The rows of a part are strided: on a mesh that shards rows,
    each device has some of its own rows in every part."""

    is_stack: bool
    dim: int  # the dimension of rows in a matrix
    units: int  # number of rows, or of blocks of rows that share a scale
    parts: int  # number of parts; divides `units`

    @property
    def rows(self) -> int:
        """The dimension of rows in the complete array."""
        return self.dim + self.is_stack

    def cut(self, x: jax.Array) -> jax.Array:
        """The dimension of rows as [units // parts, parts, rows of a unit]."""
        before = x.shape[: self.rows]
        rows, *after = x.shape[self.rows :]
        return x.reshape(*before, self.units // self.parts, self.parts, rows // self.units, *after)

    def join(self, part: jax.Array) -> jax.Array:
        """A part as a matrix: its dimensions [units // parts, rows of a unit] are one."""
        before = part.shape[: self.dim]
        units, rows, *after = part.shape[self.dim :]
        return part.reshape(*before, units * rows, *after)

    def grid(self, stack: Tree) -> Grid:
        """The parts of all matrices, in the dimensions of `cut`."""
        parts = {self.rows + 1: self.parts}
        return {0: jax.tree.leaves(stack)[0].shape[0], **parts} if self.is_stack else parts


def _division(matrices: Tree, axes: Axes, dim: int) -> Division | None:
    """The division of matrices of one shape with these logical axes; None: they stay in one part."""
    is_stack = is_stacked(axes)
    leaves = jax.tree.leaves(matrices, is_leaf=is_encoded)
    shape = leaves[0].shape[int(is_stack) :]
    by_rows = [x for x in leaves if isinstance(x, QTensor) and x.axis == dim - len(shape)]
    if any(shape[dim] % values_per_group(FORMATS[x.format].bits) for x in by_rows):
        return None  # the last bytes have unused bits: equal parts of the bytes are not equal parts of the rows
    units = shape[dim] // by_rows[0].block_size if by_rows else shape[dim]
    # Two blocks of an odd number of 4-bit codes are a unit, which begins and ends between two bytes.
    units = math.gcd(units, *(x.shape[dim + is_stack] for x in jax.tree.leaves(matrices)))
    devices = _devices(axes[int(is_stack) :])
    parts = _parts(math.prod(shape), units, math.prod(devices), devices[dim])
    return None if parts == 1 else Division(is_stack, dim, units, parts)


def _update_divided(
    function: PartFunction, division: Division, matrix: Tree, read_only: Tree, first: jax.Array
) -> Tree:
    """`update_rows` of a matrix, or of a stack of which `first` is the index of the first layer."""
    grid = division.grid(matrix)
    cut_read_only = jax.tree.map(division.cut, read_only)

    def as_matrix(part: Tree, complete: Tree) -> Tree:
        """A part of `complete` as a matrix."""
        return with_sliced_sizes(jax.tree.map(division.join, part), complete)

    def step(part: Tree, i: jax.Array) -> Tree:
        *layer, index = _place(grid, i)
        read = as_matrix(jax.tree.map(lambda x: _read(grid, x, i), cut_read_only), read_only)
        new = function(as_matrix(part, matrix), read, first + layer[0] if layer else first, index)
        return _with_shapes(new, part)

    return _with_shapes(update_parts(grid, step, jax.tree.map(division.cut, matrix)), matrix)


def _with_shapes(tree: Tree, like: Tree) -> Tree:
    """The arrays of a tree in the shapes and the structure of another tree."""
    arrays, form = jax.tree.flatten(like)
    return jax.tree.unflatten(form, [x.reshape(y.shape) for x, y in zip(jax.tree.leaves(tree), arrays, strict=True)])


def _place(grid: Grid, i: jax.Array) -> list[jax.Array]:
    """The index of part i along each dimension of a grid, the last dimension fastest. Every array of a loop needs this
    index, so few operations are used: `%` and `//` handle signs and need ten operations each."""
    _, *faster = grid.values()
    indices: list[jax.Array] = []
    for size in reversed(faster):
        indices.insert(0, jax.lax.rem(i, jnp.int32(size)))
        i = jax.lax.div(i, jnp.int32(size))
    return [i, *indices]


def _read(grid: Grid, x: jax.Array, i: jax.Array) -> jax.Array:
    sizes = [1 if dim in grid else size for dim, size in enumerate(x.shape)]
    part = jax.lax.dynamic_slice(x, _starts(grid, x, i), sizes)
    return jax.lax.squeeze(part, tuple(grid))


def _write(grid: Grid, x: jax.Array, new: jax.Array, i: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice(x, jnp.expand_dims(new, tuple(grid)), _starts(grid, x, i))


def _starts(grid: Grid, x: jax.Array, i: jax.Array) -> list[jax.Array]:
    starts = dict(zip(grid, _place(grid, i), strict=True))
    return [starts.get(dim, jnp.zeros((), jnp.int32)) for dim in range(x.ndim)]


def _devices(axes: Axes) -> list[int]:
    """The number of devices over which each dimension is sharded in the update."""
    layout = current()
    if layout is None:
        return [1] * len(axes)
    return [layout.size(over) for over in layout.mesh_axes_each("optimizer", axes)]


def _parts(size: int, units: int, devices: int, row_shards: int) -> int:
    """The least number of parts with at most PART_SIZE elements per device. The number divides `units`. Parts are
    fewer and larger if otherwise the units of a part could not be divided equally among the devices.

    >>> many = 8 * PART_SIZE
    >>> _parts(many, 16, 1, 1), _parts(many, 16, 8, 8), _parts(8 * many, 16, 8, 8), _parts(many, 16, 8, 1)
    (8, 1, 2, 1)
    """
    share = size // devices
    divisors = [n for n in range(1, units + 1) if units % n == 0]
    shared = [n for n in divisors if units // n % row_shards == 0] or divisors
    return next((n for n in shared if share <= n * PART_SIZE), shared[-1])
