"""Sharding constraints, and communication along a mesh axis. Outside of `with layout:` arrays are left as they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout as InMemory
from jax.experimental.layout import with_layout_constraint
from jax.sharding import NamedSharding, PartitionSpec

from jaxmem.sharding.layout import current
from jaxmem.sharding.table import Axes, Axis, Role, relax_resized


def constrain(x: jax.Array, *axes: str | Axis | None, role: Role = "activations") -> jax.Array:
    """Constrains the sharding of an array."""
    layout = current()
    if layout is None:
        return x
    return jax.lax.with_sharding_constraint(x, layout.sharding(role, axes, x.shape))


def row_major(x: jax.Array, *axes: str | Axis | None, role: Role = "activations") -> jax.Array:
    """Constrains the memory layout to row-major. XLA may prefer another one for a matmul, and would apply it to
    whatever the array is sliced from: for the saved activations of pipeline stages that is a copy of all of them. The
    partitioner does not support the constraint, so each device applies it to its shard."""
    layout = current()
    if layout is None:
        return x
    spec = layout.sharding(role, axes, x.shape).spec

    def pinned(x: jax.Array) -> jax.Array:
        return with_layout_constraint(x, InMemory(tuple(range(x.ndim))))

    # jax would differentiate it as a sum over all mesh axes that are not named here, some of which are vmapped later.
    @jax.custom_vjp
    def laid(x: jax.Array) -> jax.Array:
        return jax.shard_map(pinned, mesh=layout.mesh, in_specs=spec, out_specs=spec, check_vma=False)(x)

    laid.defvjp(lambda x: (laid(x), None), lambda _, g: (laid(g),))
    return laid(x)


def row_major_in_stages(x: jax.Array, *axes: str | Axis | None) -> jax.Array:
    """A layer's input, row-major where pipeline stages save it in a stack; elsewhere XLA is free to choose."""
    layout = current()
    return row_major(x, *axes) if layout and layout.size(("stage",)) > 1 else x


def vmap_groups() -> tuple[int, ...]:
    """The dimensions that the vmap of `Layout.inside_vmap` adds before an array's shape."""
    layout = current()
    return (layout.size(layout.vmapped),) if layout and layout.vmapped else ()


def shard_first_dim(x: jax.Array, axis: str | tuple[str, ...]) -> jax.Array:
    """Shards the first dimension over a mesh axis, or several; the others are left to the partitioner."""
    layout = current()
    if layout is None:
        return x
    spec = PartitionSpec(axis, *[PartitionSpec.UNCONSTRAINED] * (x.ndim - 1))
    return jax.lax.with_sharding_constraint(x, NamedSharding(layout.mesh, spec))


def rotate(x: jax.Array, axis: str, by: int) -> jax.Array:
    """`jnp.roll` along the first dimension, which has one element for each device along a mesh axis: one
    collective-permute. The partitioner would make three all-to-alls of a roll."""
    layout = current()
    if layout is None:
        return jnp.roll(x, by, axis=0)
    size = layout.mesh.shape[axis]
    pairs = [(i, (i + by) % size) for i in range(size)]
    spec = PartitionSpec(axis)

    def send(x: jax.Array) -> jax.Array:
        return jax.lax.ppermute(x, axis, pairs)

    return jax.shard_map(send, mesh=layout.mesh, in_specs=spec, out_specs=spec, axis_names={axis, *layout.vmapped})(x)


def map_shards(function: Callable[..., Any], over: tuple[str, ...], *arrays: Any) -> Any:
    """`function(*arrays)` of each shard of their first dimension over these mesh axes. Along these axes nothing is
    communicated, so each shard may take another branch of a `cond`; the partitioner handles the other axes."""
    layout = current()
    if layout is None:
        return function(*arrays)
    spec = PartitionSpec(over)
    run = jax.shard_map(
        function, mesh=layout.mesh, in_specs=spec, out_specs=spec, axis_names=set(over), check_vma=False
    )
    return run(*arrays)


def per_device(function: Callable[..., Any], arrays: Any, axes: Axes, shape: Sequence[int]) -> Any:
    """`function(*arrays)` of each device's shards, for operations that XLA's partitioner does not support. Arrays of
    `len(shape)` dimensions are sharded as optimizer state with these axes is, but replicated along a dimension in which
    one of them (block scales) does not divide; other arrays are replicated."""
    layout = current()
    if layout is None:
        return function(*arrays)
    alike = [x.shape for x in jax.tree.leaves(arrays) if x.ndim == len(shape)]
    least = [min(sizes) for sizes in zip(*alike, strict=True)]
    own = layout.sharding("optimizer", relax_resized(axes, least, shape), least).spec

    def specs(tree: Any) -> Any:
        return jax.tree.map(lambda x: own if x.ndim == len(shape) else PartitionSpec(), tree)

    made = specs(jax.eval_shape(function, *arrays))
    run = jax.shard_map(function, mesh=layout.mesh, in_specs=specs(arrays), out_specs=made, check_vma=False)
    return run(*arrays)
