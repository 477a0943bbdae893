"""Loops over the layers of a stack, or over parts of a large array, that are updated in place."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem.quant import QTensor
from jaxmem.sharding import current
from jaxmem.weights import is_quantized

PART = 1 << 23  # numbers that are decoded at once
SHARDS = 8  # parts have a multiple of so many rows where they can: meshes then cut between them


def in_turn(count: int, axis: int, one: Callable[[Any, jax.Array], Any], arrays: Any) -> Any:
    """`one(part, i)` for each of `count` parts along `axis`, each result where the part was.

    A part is read after the one before was written, from what was written, and carried to its turn. Read in its
    turn, by several users of which one might come after the write, XLA would copy the arrays to be safe.
    """

    def read(x: jax.Array, i: jax.Array) -> jax.Array:
        return jax.lax.dynamic_index_in_dim(x, i, axis, keepdims=False)

    def step(i: jax.Array, carried: tuple[Any, Any]) -> tuple[Any, Any]:
        arrays, part = carried
        arrays = jax.tree.map(lambda x, new: jax.lax.dynamic_update_index_in_dim(x, new, i, axis), arrays, one(part, i))
        return arrays, jax.tree.map(lambda x: read(x, jnp.minimum(i + 1, count - 1)), arrays)

    first = jax.tree.map(lambda x: read(x, jnp.zeros((), jnp.int32)), arrays)
    return jax.lax.fori_loop(0, count, step, (arrays, first))[0]


def layers_in_turn(one: Callable[[Any, Any, jax.Array], Any], stack: Any, beside: Any) -> Any:
    """`one(layer, beside, number)` of every layer of a stack, each result where the layer was; `beside` is a stack
    that is only read. Layers that lie on stages are updated there, by a loop on each."""
    own = current()
    over = () if own is None else own.over("optimizer", "layer")
    if own is None or not over:
        return _one_by_one(one, stack, beside, jnp.zeros((), jnp.int32))
    parts, layers = own.parts("optimizer", "layer"), jax.tree.leaves(stack)[0].shape[0]
    stack, beside = jax.tree.map(lambda x: x.reshape(parts, -1, *x.shape[1:]), (stack, beside))
    first = jnp.arange(parts, dtype=jnp.int32) * (layers // parts)
    done = jax.vmap(partial(_one_by_one, one), spmd_axis_name=over)(stack, beside, first)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), done)


def _one_by_one(one: Callable[[Any, Any, jax.Array], Any], stack: Any, beside: Any, first: jax.Array) -> Any:
    """`first` is the first layer's number."""

    def step(mine: Any, i: jax.Array) -> Any:
        read = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, 0, keepdims=False), beside)
        return one(mine, read, first + i)

    return in_turn(jax.tree.leaves(stack)[0].shape[0], 0, step, stack)


def in_parts(one: Callable[[Any, Any, jax.Array], Any], whole: Any, beside: Any) -> Any:
    """`one(part, beside, number)` on so many rows at a time that no more than 8 M numbers are ever decoded, each
    result where the part was. `whole` and `beside` are trees of arrays and QTensors of one shape, and of blocks along
    one dimension. Rows of a part are not neighbours but every so many: where a mesh splits the rows, each device works
    on its own in every part."""
    leaves = jax.tree.leaves((whole, beside), is_leaf=is_quantized)
    codes = [x for x in leaves if isinstance(x, QTensor)]
    shape = leaves[0].shape
    # No block is cut that runs along the rows.
    along = [q.block_size for q in codes if q.axis == -len(shape)]
    units = shape[0] // along[0] if along else shape[0]
    parts = _parts(math.prod(shape), units)
    if parts == 1 or any(x.shape[0] % units for x in jax.tree.leaves((whole, beside))):
        return one(whole, beside, jnp.zeros((), jnp.int32))

    def cut(x: jax.Array) -> jax.Array:
        return x.reshape(units // parts, parts, x.shape[0] // units, *x.shape[1:])

    def joined(x: jax.Array) -> jax.Array:
        return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])

    def rows(tree: Any) -> Any:
        """A part's arrays, as a part of the whole."""
        tree = jax.tree.map(joined, tree)
        shorter = lambda x: x if not _along_rows(x) else dataclasses.replace(x, size=x.size // parts)  # noqa: E731
        return jax.tree.map(shorter, tree, is_leaf=is_quantized)

    def step(part: list[jax.Array], i: jax.Array) -> list[jax.Array]:
        read = [jax.lax.dynamic_index_in_dim(x, i, 1, keepdims=False) for x in apart]
        new = one(rows(jax.tree.unflatten(form, part)), rows(jax.tree.unflatten(beside_form, read)), i)
        return [x.reshape(old.shape) for x, old in zip(jax.tree.leaves(new), part, strict=True)]

    arrays, form = jax.tree.flatten(whole)
    read_only, beside_form = jax.tree.flatten(beside)
    apart = [cut(x) for x in read_only]
    done = in_turn(parts, 1, step, [cut(x) for x in arrays])
    return jax.tree.unflatten(form, [x.reshape(y.shape) for x, y in zip(done, arrays, strict=True)])


def _along_rows(x: Any) -> bool:
    return isinstance(x, QTensor) and x.axis == -x.ndim


def _parts(size: int, units: int) -> int:
    """As many as it takes; they divide the units, if possible into multiples of eight."""
    enough = [n for n in range(1, units + 1) if units % n == 0 and size <= n * PART]
    return min((n for n in enough if units // n % SHARDS == 0), default=min(enough, default=units))
