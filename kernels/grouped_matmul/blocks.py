"""Functions of rows in groups, computed in blocks of rows of one group, one block at a time, in plain JAX.

The rows of each group are cut into blocks of a fixed size; only the last block of a group is padded. A block reads its
rows, slices the weights of its group, applies the function, and adds the result to the rows of the output. So the
memory of a call is the output in float32 and the intermediates of one block. For R rows in G groups there are at most
R / block + G blocks. The backward pass recomputes each block. The weight gradient of a group is summed in float32 over
its blocks, which are consecutive, and then written to the gradient of all groups.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxmem.kernels.scopes import run_count
from jaxmem.kernels.typing import Tree

# (trainable and frozen weights of a group, rows [block, inputs], values of these rows) -> [block, outputs]
GroupFunction = Callable[[Tree, Tree, jax.Array, Tree], jax.Array]
MIN_BLOCK, MAX_BLOCK = 16, 512  # limits of the rows of a block


class Groups(NamedTuple):
    """Rows sorted by group: `rows[starts[g]:stops[g]]` are the rows of x that belong to group g, without
    repetitions."""

    rows: Int[Array, " sorted"]
    starts: Int[Array, " groups"]
    stops: Int[Array, " groups"]
    order: Int[Array, " sorted"]  # the order of the choices [rows x choices] that sorts them

    def places(self) -> Int[Array, " sorted"]:
        """The place of each choice among the sorted rows: the inverse of `order`."""
        places = jnp.arange(self.order.size, dtype=self.order.dtype)
        return jnp.zeros_like(self.order).at[self.order].set(places, unique_indices=True)


def sort_rows(groups: Int[Array, "rows choices"], count: int) -> Groups:
    """The rows of each of `count` groups, of which each row belongs to several (`choices`). Indices outside of the
    range belong to no group."""
    flat = groups.reshape(-1)
    flat = jnp.where((flat >= 0) & (flat < count), flat, count)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    first_places = jnp.searchsorted(flat[order], jnp.arange(count + 1, dtype=flat.dtype)).astype(jnp.int32)
    return Groups(order // groups.shape[-1], first_places[:-1], first_places[1:], order)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def sum_of_groups(y: Float[Array, "sorted width"], groups: Groups, rows: int) -> Float[Array, "rows width"]:
    """For each of `rows` rows, the sum of its results over its groups, in float32, rounded to the dtype of y."""
    results = y[groups.places()].reshape(rows, -1, y.shape[1])
    return jnp.sum(results, axis=1, dtype=jnp.float32).astype(y.dtype)


@jax.custom_vjp
def rows_of_groups(x: Float[Array, "rows width"], groups: Groups) -> Float[Array, "sorted width"]:
    """The rows of x sorted by group; also those that belong to no group, whose gradient must be 0."""
    return x[groups.rows]


sum_of_groups.defvjp(
    lambda y, groups, rows: (sum_of_groups(y, groups, rows), groups),
    lambda _, groups, g: (rows_of_groups(g, groups), None),
)
rows_of_groups.defvjp(
    lambda x, groups: (rows_of_groups(x, groups), (groups, jnp.zeros((x.shape[0], 0)))),
    lambda saved, g: (sum_of_groups(g, saved[0], saved[1].shape[0]), None),
)


def map_groups(
    function: GroupFunction,
    weights: Tree,
    frozen: Tree,
    x: Float[Array, "rows inputs"],
    values: Tree,
    groups: Groups,
    *,
    parts: int = 1,
) -> Float[Array, "rows outputs"]:
    """For each row of x, the sum over its groups of `function(weights, frozen, rows, values)`, in float32. Gradients
    exist for `weights`, `x` and `values`.

    Args:
        function: Of the weights of one group and some rows of it.
        weights: Trainable leaves, [groups, ...].
        frozen: Leaves without gradient, [groups, ...].
        x: [rows, inputs].
        values: Leaves [sorted, ...], in the order of `groups.rows`.
        groups: The rows of each group.
        parts: About 1 / `parts` of `groups.rows` belongs to these groups. If it is above 1, the number of blocks is
            computed at run time, and `jax.vmap` of the loop copies the result in each block.
    """
    return _map(function, parts, weights, frozen, x, values, groups)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _map(
    function: GroupFunction,
    parts: int,
    weights: Tree,
    frozen: Tree,
    x: jax.Array,
    values: Tree,
    groups: Groups,
) -> jax.Array:
    blocks = _Blocks.of(groups, x.shape[0], parts)

    def step(i: jax.Array, y: jax.Array) -> jax.Array:
        rows, places, group = blocks.read(i)
        results = function(_take(weights, group), _take(frozen, group), _rows(x, rows), _rows(values, places))
        return y.at[rows].add(results.astype(jnp.float32), mode="drop")

    zeros = jnp.zeros((x.shape[0], _outputs(function, weights, frozen, x, values)), jnp.float32)
    return blocks.loop(step, zeros, parts > 1)


def _backward(function: GroupFunction, parts: int, saved: Tree, g: jax.Array) -> tuple[Tree, ...]:
    weights, frozen, x, values, groups = saved
    blocks = _Blocks.of(groups, x.shape[0], parts)

    def step(i: jax.Array, carry: tuple[Tree, ...]) -> tuple[Tree, ...]:
        of_weights, sums, of_x, of_values = carry
        rows, places, group = blocks.read(i)
        frozen_weights = _take(frozen, group)
        y, derivative = jax.vjp(
            lambda weights, x, values: function(weights, frozen_weights, x, values),
            _take(weights, group),
            _rows(x, rows),
            _rows(values, places),
        )
        dw, dx, dvalues = derivative(_rows(g, rows).astype(y.dtype))
        first = blocks.is_first[i]
        sums = jax.tree.map(lambda s, w: jnp.where(first, 0, s) + w.astype(jnp.float32), sums, dw)
        put = lambda dw, s: jax.lax.dynamic_update_index_in_dim(dw, s.astype(dw.dtype), group, 0)  # noqa: E731
        of_x = of_x.at[rows].add(dx.astype(jnp.float32), mode="drop")
        of_values = jax.tree.map(lambda v, d: v.at[places].set(d, mode="drop"), of_values, dvalues)
        return jax.tree.map(put, of_weights, sums), sums, of_x, of_values

    begin = (
        jax.tree.map(jnp.zeros_like, weights),
        jax.tree.map(lambda w: jnp.zeros(w.shape[1:], jnp.float32), weights),
        jnp.zeros(x.shape, jnp.float32),
        jax.tree.map(jnp.zeros_like, values),
    )
    of_weights, _, of_x, of_values = blocks.loop(step, begin, parts > 1)
    return of_weights, None, of_x.astype(x.dtype), of_values, None


_map.defvjp(lambda function, parts, *saved: (_map(function, parts, *saved), saved), _backward)


class _Blocks(NamedTuple):
    """The blocks of all groups, in order. Blocks beyond `used` are empty and belong to the last group with rows."""

    size: int  # rows of a block
    used: Int[Array, ""]
    start: Int[Array, " blocks"]  # the index of the first row of each block among the sorted rows
    stop: Int[Array, " blocks"]  # the index after the last row of each block
    group: Int[Array, " blocks"]
    is_first: Any  # whether a block is the first of its group
    rows: Int[Array, " sorted"]
    limit: int  # the number of rows of x, which is the index of padding

    @classmethod
    def of(cls, groups: Groups, limit: int, parts: int) -> "_Blocks":
        size = usual_rows(groups.rows.shape[0] // parts, groups.starts.shape[0])
        start, stop, group, is_first, used = block_table(groups.starts, groups.stops, size, groups.rows.shape[0])
        return cls(size, used, start, stop, group, is_first, groups.rows, limit)

    def read(self, i: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The rows of x, their places among the sorted rows, and the group of a block. Padding is out of bounds."""
        places = self.start[i] + jnp.arange(self.size, dtype=jnp.int32)
        places = jnp.where(places < self.stop[i], places, self.rows.shape[0])
        rows = self.rows.at[places].get(mode="fill", fill_value=self.limit)
        return rows, places, self.group[i]

    def loop(self, step: Callable[[jax.Array, Tree], Tree], begin: Tree, counts_blocks: bool) -> Tree:
        most = self.start.shape[0]
        with jax.named_scope(run_count(most, 1)):  # the largest number of runs
            return jax.lax.fori_loop(0, self.used if counts_blocks else most, step, begin)


def block_table(starts: jax.Array, stops: jax.Array, size: int, length: int) -> tuple[jax.Array, ...]:
    """The first row of each block of `size` rows, the end of its group, its group, whether it is the first of its
    group, and the number of blocks with rows. `length`: the number of sorted rows."""
    number = starts.shape[0]
    counts = -(-(stops - starts) // size)
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    i = jnp.arange(length // size + min(number, length), dtype=jnp.int32)
    used = jnp.minimum(i, jnp.maximum(ends[-1] - 1, 0))
    group = jnp.minimum(jnp.searchsorted(ends, used, side="right").astype(jnp.int32), number - 1)
    within = used - (ends - counts)[group]
    start = starts[group] + within * size
    stop = jnp.where(i < ends[-1], stops[group], start)
    return start, stop, group, (within == 0) & (i == used), ends[-1]


def usual_rows(rows: int, groups: int) -> int:
    """A power of two near the number of rows of a group: smaller blocks slice and decode weights more often, larger
    blocks have more padding.

    >>> usual_rows(16384, 128), usual_rows(16, 128), usual_rows(1 << 20, 8)
    (128, 16, 512)
    """
    return min(max(1 << (max(rows // groups, 1).bit_length() - 1), MIN_BLOCK), MAX_BLOCK)


def _take(tree: Tree, group: jax.Array) -> Tree:
    return jax.tree.map(lambda w: jax.lax.dynamic_index_in_dim(w, group, keepdims=False), tree)


def _rows(tree: Tree, rows: jax.Array) -> Tree:
    return jax.tree.map(lambda x: x.at[rows].get(mode="fill", fill_value=0), tree)


def _outputs(function: GroupFunction, *arrays: Tree) -> int:
    weights, frozen, x, values = (
        jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), tree) for tree in arrays
    )
    one_row = lambda tree: jax.tree.map(lambda a: jax.ShapeDtypeStruct((1, *a.shape), a.dtype), tree)  # noqa: E731
    return jax.eval_shape(function, weights, frozen, one_row(x), one_row(values)).shape[-1]
