"""Functions of sorted rows of several groups, computed in chunks of one size.

Of n devices that share the groups, each may have to compute all rows of all devices, but usually computes about 1/n of
them. A loop computes these in chunks, usually in one, so the intermediates are as large as for a balanced load. The
backward pass recomputes each chunk.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmem.kernels.typing import Tree

from .blocks import Groups

# (trainable and frozen weights, rows [chunk, width], values of these rows, their groups) -> [chunk, width]
ChunkFunction = Callable[[Tree, Tree, jax.Array, jax.Array, Groups], jax.Array]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def map_chunks(
    function: ChunkFunction,
    size: int,
    weights: Tree,
    frozen: Tree,
    x: Float[Array, "rows width"],
    values: Float[Array, " sorted"],
    groups: Groups,
) -> Float[Array, "rows width"]:
    """For each row of x, the sum over its groups of `function(weights, frozen, rows, values, groups)`. A chunk has
    `size` rows; `values` are in the order of `groups.rows`. Gradients exist for `weights`, `x` and `values`."""
    chunks = _Chunks(size, x.shape[0], groups)

    def step(i: jax.Array, y: jax.Array) -> jax.Array:
        chunk = chunks.groups(i)
        return y + chunks.sum_of_rows(i, function(weights, frozen, x[chunk.rows], chunks.read(i, values), chunk))

    return chunks.loop(step, jnp.zeros_like(x))


def _backward(function: ChunkFunction, size: int, saved: Tree, g: jax.Array) -> tuple[Tree, ...]:
    weights, frozen, x, values, groups = saved
    chunks = _Chunks(size, x.shape[0], groups)

    def step(i: jax.Array, carry: tuple[Tree, ...]) -> tuple[Tree, ...]:
        of_weights, of_x, of_values = carry
        chunk = chunks.groups(i)
        _, derivative = jax.vjp(
            lambda weights, x, values: function(weights, frozen, x, values, chunk),
            weights,
            x[chunk.rows],
            chunks.read(i, values),
        )
        dw, dx, dvalues = derivative(g[chunk.rows])
        of_values = jax.lax.dynamic_update_slice_in_dim(of_values, dvalues, i * size, 0)
        return jax.tree.map(jnp.add, of_weights, dw), of_x + chunks.sum_of_rows(i, dx), of_values

    begin = jax.tree.map(jnp.zeros_like, weights), jnp.zeros_like(x), jnp.zeros(chunks.padded, values.dtype)
    of_weights, of_x, of_values = chunks.loop(step, begin)
    return of_weights, None, of_x, of_values[: values.shape[0]], None


map_chunks.defvjp(lambda function, size, *saved: (map_chunks(function, size, *saved), saved), _backward)


class _Chunks:
    """The sorted rows that belong to a group, in chunks."""

    def __init__(self, size: int, rows: int, groups: Groups):
        self.size = size
        self.all = groups
        self.padded = -(-groups.order.size // size) * size
        self.places = groups.places().reshape(rows, -1)  # the places of each row among the sorted rows

    def read(self, i: jax.Array, x: jax.Array) -> jax.Array:
        padded = jnp.pad(x, (0, self.padded - x.shape[0]))
        return jax.lax.dynamic_slice_in_dim(padded, i * self.size, self.size)

    def groups(self, i: jax.Array) -> Groups:
        rows = self.read(i, self.all.rows)
        starts, stops = (jnp.clip(edges - i * self.size, 0, self.size) for edges in (self.all.starts, self.all.stops))
        return Groups(rows, starts, stops, rows)

    def sum_of_rows(self, i: jax.Array, y: jax.Array) -> jax.Array:
        """The sum of the results of a chunk for each row."""
        within = self.places - i * self.size
        within = jnp.where((within >= 0) & (within < self.size), within, self.size)
        values = y.at[within].get(mode="fill", fill_value=0)
        return jnp.sum(values, axis=1, dtype=jnp.float32).astype(y.dtype)

    def loop(self, step: Callable[[jax.Array, Tree], Tree], begin: Tree) -> Tree:
        return jax.lax.fori_loop(0, -(-self.all.stops[-1] // self.size), step, begin)
