"""Loops that update a stack layer by layer, or a matrix some rows at a time, in place."""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem.quant import QTensor
from jaxmem.sharding import Axes, current, map_shards
from jaxmem.sharding.weights import is_quantized

Grid = dict[int, int]  # dimension -> number of parts
Each = Callable[[Any, Any, jax.Array, jax.Array], Any]

PART_SIZE = 1 << 23  # elements that a device dequantizes at once


def update_parts(grid: Grid, one: Callable[[Any, jax.Array], Any], arrays: Any) -> Any:
    """Applies `one(part, index)` to each part of arrays divided by a grid, and writes each result in place of its part.

    A part is read after the previous write, and passed to its iteration through the loop carry. If an iteration read
    its own part for several uses, one of which might follow the write, XLA would copy the complete arrays.
    """
    count = math.prod(grid.values())

    def step(i: jax.Array, carried: tuple[Any, Any]) -> tuple[Any, Any]:
        arrays, part = carried
        arrays = jax.tree.map(lambda x, new: _written(grid, x, new, i), arrays, one(part, i))
        return arrays, jax.tree.map(lambda x: _read(grid, x, jnp.minimum(i + 1, count - 1)), arrays)

    first = jax.tree.map(lambda x: _read(grid, x, jnp.zeros((), jnp.int32)), arrays)
    return jax.lax.fori_loop(0, count, step, (arrays, first))[0]


def update_layers(one: Callable[[Any, Any, jax.Array], Any], stack: Any, beside: Any) -> Any:
    """Applies `one(layer, beside, index)` to every layer of a stack, in place. `beside` is a stack that is only
    read."""

    return _per_stage(partial(_update_each, one), stack, beside)


def _update_each(one: Callable[[Any, Any, jax.Array], Any], stack: Any, beside: Any, first: jax.Array) -> Any:
    """`first`: the index of the first layer."""

    def step(mine: Any, i: jax.Array) -> Any:
        return one(mine, jax.tree.map(lambda x: _read(grid, x, i), beside), first + i)

    grid = {0: jax.tree.leaves(stack)[0].shape[0]}
    return update_parts(grid, step, stack)


def _per_stage(loop: Callable[[Any, Any, jax.Array], Any], stack: Any, beside: Any) -> Any:
    """Runs `loop(layers, beside, index of the first layer)` on a stack. With pipeline parallelism there is one loop per
    stage, with its own conditionals: under `jax.vmap` all stages would execute the branches that any of them needs."""
    own = current()
    over = () if own is None else own.over("optimizer", "layer")
    if own is None or not over:
        return loop(stack, beside, jnp.zeros((), jnp.int32))
    parts, layers = own.parts("optimizer", "layer"), jax.tree.leaves(stack)[0].shape[0]
    first = jnp.arange(parts, dtype=jnp.int32) * (layers // parts)
    return map_shards(lambda stack, beside, first: loop(stack, beside, first[0]), over, stack, beside, first)


def update_rows(one: Each, whole: Any, beside: Any, axes: Axes) -> Any:
    """Applies `one(part, beside, layer, index)` to some rows of a matrix at a time, in place, so that no device
    dequantizes more than 8 M elements at once. `whole` and `beside` are trees of arrays and QTensors with the same
    shape and these axes, and with blocks along one dimension. A stack of layers is one loop over the parts of all
    layers.

    The rows of a part are strided, so that on a mesh that shards rows each device has some of its own rows in every
    part."""
    if axes[:1] == ("layer",):
        return _per_stage(partial(_update_rows, one, axes[1:]), whole, beside)
    return _update_rows(one, axes, whole, beside, None)


def _update_rows(one: Each, axes: Axes, whole: Any, beside: Any, first: jax.Array | None) -> Any:
    """`first` is the index of the first layer of a stack; None: not a stack."""
    leaves = jax.tree.leaves((whole, beside), is_leaf=is_quantized)
    codes = [x for x in leaves if isinstance(x, QTensor)]
    rows = int(first is not None)  # their dimension
    shape = leaves[0].shape[rows:]
    # Blocks along rows are not split.
    along = [q.block_size for q in codes if q.axis == -len(shape)]
    units = shape[0] // along[0] if along else shape[0]
    parts = _parts(math.prod(shape), units, _devices(axes))
    if any(x.shape[rows] % units for x in jax.tree.leaves((whole, beside))):
        parts = 1
    if parts == 1:
        zero = jnp.zeros((), jnp.int32)
        each = lambda part, beside, layer: one(part, beside, layer, zero)  # noqa: E731
        return each(whole, beside, zero) if first is None else _update_each(each, whole, beside, first)
    grid = {rows + 1: parts} if first is None else {0: leaves[0].shape[0], rows + 1: parts}

    def cut(x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:rows], units // parts, parts, x.shape[rows] // units, *x.shape[rows + 1 :])

    def matrix(tree: Any) -> Any:
        """The arrays of a part, as a matrix."""
        tree = jax.tree.map(lambda x: x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]), tree)
        shorter = lambda x: x if not _along_rows(x) else dataclasses.replace(x, size=x.size // parts)  # noqa: E731
        return jax.tree.map(shorter, tree, is_leaf=is_quantized)

    def step(part: list[jax.Array], i: jax.Array) -> list[jax.Array]:
        *layer, number = _place(grid, i)
        read = [_read(grid, x, i) for x in apart]
        own = sum(layer, jnp.zeros((), jnp.int32) if first is None else first)
        new = one(matrix(jax.tree.unflatten(form, part)), matrix(jax.tree.unflatten(beside_form, read)), own, number)
        return [x.reshape(old.shape) for x, old in zip(jax.tree.leaves(new), part, strict=True)]

    arrays, form = jax.tree.flatten(whole)
    read_only, beside_form = jax.tree.flatten(beside)
    apart = [cut(x) for x in read_only]
    done = update_parts(grid, step, [cut(x) for x in arrays])
    return jax.tree.unflatten(form, [x.reshape(y.shape) for x, y in zip(done, arrays, strict=True)])


def _place(grid: Grid, i: jax.Array) -> list[jax.Array]:
    """The index of part i along each dimension of a grid, the last one fastest. Each array of a loop calls it, so
    it takes few operations: `%` and `//` handle signs and take ten each."""
    _, *faster = grid.values()
    found: list[jax.Array] = []
    for size in reversed(faster):
        found.insert(0, jax.lax.rem(i, jnp.int32(size)))
        i = jax.lax.div(i, jnp.int32(size))
    return [i, *found]


def _read(grid: Grid, x: jax.Array, i: jax.Array) -> jax.Array:
    sizes = [1 if dim in grid else size for dim, size in enumerate(x.shape)]
    part = jax.lax.dynamic_slice(x, _starts(grid, x, i), sizes)
    return jax.lax.squeeze(part, tuple(grid))


def _written(grid: Grid, x: jax.Array, new: jax.Array, i: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice(x, jnp.expand_dims(new, tuple(grid)), _starts(grid, x, i))


def _starts(grid: Grid, x: jax.Array, i: jax.Array) -> list[jax.Array]:
    at = dict(zip(grid, _place(grid, i), strict=True))
    return [at.get(dim, jnp.zeros((), jnp.int32)) for dim in range(x.ndim)]


def _along_rows(x: Any) -> bool:
    return isinstance(x, QTensor) and x.axis == -x.ndim


def _devices(axes: Axes) -> list[int]:
    """Number of devices that each dimension is sharded over in the update."""
    layout = current()
    return [1] if layout is None else [layout.size(over) for over in layout.mesh_axes_each("optimizer", axes)]


def _parts(size: int, units: int, devices: list[int]) -> int:
    """The least number of parts of at most PART_SIZE elements per device. It is a divisor of the number of units, and
    each device has the same number of units of a part, if necessary with fewer parts; otherwise a part would be sent.

    >>> many = 8 * PART_SIZE
    >>> _parts(many, 16, [1]), _parts(many, 16, [8]), _parts(8 * many, 16, [8]), _parts(many, 16, [1, 8])
    (8, 1, 2, 1)
    """
    own = size // math.prod(devices)
    found = [n for n in range(1, units + 1) if units % n == 0]
    shared = [n for n in found if units // n % devices[0] == 0] or found
    return next((n for n in shared if own <= n * PART_SIZE), shared[-1])
