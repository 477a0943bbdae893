"""Arrays told where to lie, and sent along a mesh axis. Outside `with layout:` nothing happens to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout as InMemory
from jax.experimental.layout import with_layout_constraint
from jax.sharding import NamedSharding, PartitionSpec

from jaxmem.sharding.layout import current
from jaxmem.sharding.table import Axes, Role, as_even


def constrain(x: jax.Array, *axes: str | None, role: Role = "activations") -> jax.Array:
    """Pin an array to its place. Nothing happens outside a layout."""
    layout = current()
    if layout is None:
        return x
    return jax.lax.with_sharding_constraint(x, layout.sharding(role, axes, x.shape))


def row_major(x: jax.Array, *axes: str | None, role: Role = "activations") -> jax.Array:
    """In memory row after row, as arrays come and go. Another order, if products like it, XLA would give to all that
    this array is cut out of: of what stages keep of their layers it would hold a copy. The partitioner cannot cut what
    says it, so each device says it of its own part."""
    layout = current()
    if layout is None:
        return x
    spec = layout.sharding(role, axes, x.shape).spec

    def pinned(x: jax.Array) -> jax.Array:
        return with_layout_constraint(x, InMemory(tuple(range(x.ndim))))

    # Differentiated by jax it would add up over all axes that are not named here, of which some are mapped over later.
    @jax.custom_vjp
    def laid(x: jax.Array) -> jax.Array:
        return jax.shard_map(pinned, mesh=layout.mesh, in_specs=spec, out_specs=spec, check_vma=False)(x)

    laid.defvjp(lambda x: (laid(x), None), lambda _, g: (laid(g),))
    return laid(x)


def kept_by_stages(x: jax.Array, *axes: str | None) -> jax.Array:
    """A layer's input, which stages keep in a stack: as that lies. Elsewhere XLA is free to order it."""
    layout = current()
    return row_major(x, *axes) if layout and layout.size(("stage",)) > 1 else x


def groups() -> tuple[int, ...]:
    """What the vmap of `Layout.within` puts before an array's shape."""
    layout = current()
    return (layout.size(layout.vmapped),) if layout and layout.vmapped else ()


def split_first(x: jax.Array, axis: str | tuple[str, ...]) -> jax.Array:
    """Split the first dimension over a mesh axis, or several; how the others lie is left to the partitioner."""
    layout = current()
    if layout is None:
        return x
    spec = PartitionSpec(axis, *[PartitionSpec.UNCONSTRAINED] * (x.ndim - 1))
    return jax.lax.with_sharding_constraint(x, NamedSharding(layout.mesh, spec))


def rotate(x: jax.Array, axis: str, by: int) -> jax.Array:
    """`jnp.roll` along the first dimension, which has one place for each device along a mesh axis: one message to
    the neighbour. Left to the partitioner, a roll becomes three all-to-alls."""
    layout = current()
    if layout is None:
        return jnp.roll(x, by, axis=0)
    size = layout.mesh.shape[axis]
    pairs = [(i, (i + by) % size) for i in range(size)]
    spec = PartitionSpec(axis)

    def send(x: jax.Array) -> jax.Array:
        return jax.lax.ppermute(x, axis, pairs)

    return jax.shard_map(send, mesh=layout.mesh, in_specs=spec, out_specs=spec, axis_names={axis, *layout.vmapped})(x)


def each_part(function: Callable[..., Any], over: tuple[str, ...], *arrays: Any) -> Any:
    """`function(*arrays)` of each part of their first dimension, which these mesh axes split. Along the other axes the
    partitioner cuts what it does; along these nothing is sent, so each part may take another branch of a `cond`."""
    layout = current()
    if layout is None:
        return function(*arrays)
    spec = PartitionSpec(over)
    run = jax.shard_map(
        function, mesh=layout.mesh, in_specs=spec, out_specs=spec, axis_names=set(over), check_vma=False
    )
    return run(*arrays)


def on_each_device(function: Callable[..., Any], arrays: Any, axes: Axes, shape: Sequence[int]) -> Any:
    """`function(*arrays)` of each device's own part, for what XLA's partitioner cannot cut. Arrays of the rank of one
    with these axes and this shape lie as it does among the optimizer's, whole along a dimension in which one of them
    (constants of blocks) would be cut in the midst; others are whole."""
    layout = current()
    if layout is None:
        return function(*arrays)
    alike = [x.shape for x in jax.tree.leaves(arrays) if x.ndim == len(shape)]
    least = [min(sizes) for sizes in zip(*alike, strict=True)]
    own = layout.sharding("optimizer", as_even(axes, least, shape), least).spec

    def specs(tree: Any) -> Any:
        return jax.tree.map(lambda x: own if x.ndim == len(shape) else PartitionSpec(), tree)

    made = specs(jax.eval_shape(function, *arrays))
    run = jax.shard_map(function, mesh=layout.mesh, in_specs=specs(arrays), out_specs=made, check_vma=False)
    return run(*arrays)
