"""Sharding constraints, and communication along a mesh axis. Outside of `with layout:` arrays do not change."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout as InMemory
from jax.experimental.layout import with_layout_constraint
from jax.sharding import NamedSharding, PartitionSpec

from jaxmem.sharding.layout import current
from jaxmem.sharding.table import Axes, Axis, Role, assign_mesh_axes, axis_name, is_axes
from jaxmem.typing import AxesTree, Tree

GROUPS = "groups"  # the axis name of the vmap of `Layout.inside_vmap`


def constrain(x: jax.Array, *axes: str | Axis | None, role: Role = "activations") -> jax.Array:
    """Constrains the sharding of an array."""
    layout = current()
    if layout is None:
        return x
    return jax.lax.with_sharding_constraint(x, layout.sharding(role, axes, x.shape))


def row_major(x: jax.Array, *axes: str | Axis | None, role: Role = "activations") -> jax.Array:
    """Constrains the memory layout to row-major. XLA may prefer another layout for a matmul and apply it to the array
    from which this one is sliced, which copies all saved activations of a pipeline stage. The partitioner does not
    support the constraint, so each device applies it to its shard."""
    layout = current()
    if layout is None:
        return x
    spec = layout.sharding(role, axes, x.shape).spec

    def constrain_shard(x: jax.Array) -> jax.Array:
        return with_layout_constraint(x, InMemory(tuple(range(x.ndim))))

    # jax would differentiate the shard_map as a sum over all other mesh axes, some of which are vmapped later.
    @jax.custom_vjp
    def row_major_shards(x: jax.Array) -> jax.Array:
        return map_devices(constrain_shard, spec, spec)(x)

    row_major_shards.defvjp(lambda x: (row_major_shards(x), None), lambda _, g: (row_major_shards(g),))
    return row_major_shards(x)


def row_major_if_gathered(x: jax.Array, axes: Axes, role: Role, other: Role) -> jax.Array:
    """Constrains the array to row-major on each device if the two roles are sharded differently. A gather or scatter
    along a dimension is fastest if that dimension is outermost, so XLA would transpose the complete stack of layers
    from which the array is sliced, or into which it is written, which is a second copy of the stack."""
    layout = current()
    if layout is None or x.ndim < 2 or layout.mesh_axes_each(role, axes) == layout.mesh_axes_each(other, axes):
        return x
    return row_major(x, *axes, role=role)


def row_major_in_stages(x: jax.Array, *axes: str | Axis | None) -> jax.Array:
    """The input of a layer, row-major where pipeline stages save it in a stack; otherwise XLA chooses the layout."""
    layout = current()
    return row_major(x, *axes) if layout and layout.size(("stage",)) > 1 else x


def vmap_groups() -> tuple[int, ...]:
    """The leading dimensions that the vmap of `Layout.inside_vmap` adds to an array."""
    layout = current()
    return (layout.size(layout.vmapped),) if layout and layout.vmapped else ()


def mean_over_groups(x: jax.Array) -> jax.Array:
    """The mean over the groups of rows of the vmap of `Layout.inside_vmap`, or of `map_stages`."""
    groups = GROUPS if vmap_groups() else tuple(a for a in jax.sharding.get_abstract_mesh().manual_axes if a != "stage")
    return jax.lax.pmean(x, groups) if groups else x


def shard_first_dim(x: jax.Array, axis: str | tuple[str, ...]) -> jax.Array:
    """Shards the first dimension over one or several mesh axes. The partitioner shards the other dimensions."""
    layout = current()
    if layout is None:
        return x
    spec = PartitionSpec(axis, *[PartitionSpec.UNCONSTRAINED] * (x.ndim - 1))
    return jax.lax.with_sharding_constraint(x, NamedSharding(layout.mesh, spec))


def vocab_over() -> tuple[str, ...]:
    """The mesh axes of an enclosing `jax.shard_map` over which matrices are shards of the vocabulary."""
    layout = current()
    return layout.vocab_over if layout else ()


def all_reduce(x: jax.Array, over: str | tuple[str, ...]) -> jax.Array:
    """`jax.lax.psum`. XLA's compiler for CPUs fails for 16-bit floats where other mesh axes are sharded by the
    partitioner, so there the sum is computed in float32."""
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return jax.lax.psum(x, over)
    return jax.lax.platform_dependent(
        x,
        cpu=lambda x: jax.lax.psum(x.astype(jnp.float32), over).astype(x.dtype),
        default=lambda x: jax.lax.psum(x, over),
    )


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def sum_parts(x: jax.Array, over: tuple[str, ...]) -> jax.Array:
    """The sum over mesh axes of a `jax.shard_map`. Each device has the gradient of the sum, which is the gradient of
    its part."""
    return all_reduce(x, over) if over else x


sum_parts.defvjp(lambda x, over: (sum_parts(x, over), None), lambda _, __, g: (g,))


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def sum_gradients(x: jax.Array, over: tuple[str, ...]) -> jax.Array:  # noqa: ARG001
    """x, which is equal on all devices along mesh axes of a `jax.shard_map`; its gradient is the sum of theirs."""
    return x


sum_gradients.defvjp(lambda x, _: (x, None), lambda over, _, g: (all_reduce(g, over) if over else g,))


def map_layers(
    function: Callable[..., Any], count: int, in_axes: AxesTree, out_axes: AxesTree, axis: str = "layer"
) -> Callable[..., Any]:
    """`function(*arrays, first)` on the layers of each pipeline stage, of which `first` is the index of the first one;
    with `axis` `expert`, on the experts of each device.

    Arrays whose axes begin with `axis` are sharded over its mesh axes; others are the same in all shards. There is no
    communication along these mesh axes, so the shards may take different branches of a `cond`. The partitioner handles
    the other mesh axes. A stack whose number of layers is not divisible is outside of the pipeline, and replicated.

    Args:
        function: computes arrays from the arrays of one shard.
        count: the number of layers of the stack, or of experts.
        in_axes: the axes of each array.
        out_axes: the axes of the results.
        axis: the logical axis of layers.
    """
    layout = current()
    # Arrays may be optimizer state: `make_tables` gives `layer` and `expert` the same mesh axes in both roles.
    over = layout.over("weights", axis) if layout else ()
    parts = layout.size(over) if layout else 1
    if layout is None or parts == 1 or count % parts:
        return lambda *arrays: function(*arrays, jnp.zeros((), jnp.int32))

    def specs(axes: AxesTree) -> Tree:
        return jax.tree.map(lambda names: PartitionSpec(*[over] * (names[:1] == (axis,))), axes, is_leaf=is_axes)

    def run(first: jax.Array, *arrays: Tree) -> Tree:
        with layout.inside_shard_map(over):
            return function(*arrays, first[0])

    first = jnp.arange(parts, dtype=jnp.int32) * (count // parts)
    mapped = map_devices(run, (PartitionSpec(over), *specs(in_axes)), specs(out_axes), over=over)
    return partial(mapped, first)


def map_devices(
    function: Callable[..., Any], in_specs: Tree, out_specs: Tree, *, over: Sequence[str] = (), check_vma: bool = False
) -> Callable[..., Any]:
    """`function` on the shards of each device, in the current layout. `over`: the mesh axes; by default all, or inside
    of another `jax.shard_map` the mesh axes of the partitioner that are left."""
    layout = current()
    mesh = jax.sharding.get_abstract_mesh()
    assert layout is not None
    names = {*(over or (mesh.auto_axes if mesh.manual_axes else layout.mesh.axis_names))}
    inside = None if mesh.manual_axes else layout.mesh
    specs = {"in_specs": in_specs, "out_specs": out_specs}
    return jax.shard_map(function, mesh=inside, axis_names=names, check_vma=check_vma, **specs)


def map_dot(
    dot: Callable[[jax.Array, jax.Array], jax.Array],
    contracted: tuple[tuple[int, ...], tuple[int, ...]],
    over: tuple[Sequence[tuple[str, ...]], Sequence[tuple[str, ...]]],
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """`dot` of two arrays on the shards of each device. Partial sums are an array [shards, ...], so that XLA's
    partitioner reduces them like those of its own dots.

    Args:
        dot: contracts dimensions of two arrays; the result has the other dimensions of both.
        contracted: these dimensions of each array.
        over: the mesh axes that shard each dimension of each array.
    """
    layout = current()
    mesh = jax.sharding.get_abstract_mesh()
    is_local = mesh.manual_axes and not mesh.auto_axes  # inside of a `jax.shard_map` over all mesh axes
    if layout is None or layout.mesh.size == 1 or is_local:
        return dot
    summed = tuple(axis for dim in contracted[0] for axis in over[0][dim])
    kept = [
        axes
        for of_dims, dims in zip(over, contracted, strict=True)
        for dim, axes in enumerate(of_dims)
        if dim not in dims
    ]
    *in_specs, out_spec = (PartitionSpec(*(axes or None for axes in of_dims)) for of_dims in (*over, (summed, *kept)))
    partial_sums = map_devices(lambda a, b: dot(a, b)[None], tuple(in_specs), out_spec)
    return lambda a, b: sum_over_shards(partial_sums(a, b))


def sum_over_shards(parts: jax.Array) -> jax.Array:
    """[shards, ...] -> the sum of all shards, communicated in its dtype: `jnp.sum` would communicate float32."""

    def total(parts: jax.Array) -> jax.Array:
        return jax.lax.reduce(parts, jnp.zeros((), parts.dtype), jax.lax.add, (0,))

    def total_on_cpu(parts: jax.Array) -> jax.Array:  # as in `all_reduce`
        return total(parts.astype(jnp.float32)).astype(parts.dtype)

    return jax.lax.platform_dependent(parts, cpu=total_on_cpu, default=total)


def vocab_parts(over: str, axes: Axes, x: Tree) -> PartitionSpec:
    """How a mesh axis shards the vocabulary of a stored weight, for `jax.shard_map`."""
    layout = current()
    assert layout is not None
    split = assign_mesh_axes(axes, x.shape, layout.tables.weights, layout.mesh.shape)
    names = [axis and axis_name(axis) for axis in axes]
    return PartitionSpec(
        *(over if name == "vocab" and over in mesh else None for name, mesh in zip(names, split, strict=True))
    )


def map_stages(
    function: Callable[..., Any], stage: str, groups: tuple[str, ...], others: Tree, results: Tree
) -> Callable[..., Any]:
    """A function on each pipeline stage: (layers, others, batch, scalar) -> (layers, others, sums).

    Args:
        function: has these arguments and results. Layers are sharded over stages.
        stage: the mesh axis of stages.
        groups: mesh axes over which rows, the second dimension of the batch, are divided; the first two results are
            then [groups, ...].
        others: the shardings of the second argument over stages (`vocab_parts`).
        results: the shardings of the second result.
    """
    leading = [groups] if groups else []
    of_results = jax.tree.map(lambda spec: PartitionSpec(*leading, *spec), results)
    return map_devices(
        function,
        (PartitionSpec(stage), others, PartitionSpec(None, groups or None), PartitionSpec()),
        (PartitionSpec(*leading, stage), of_results, PartitionSpec()),
        over=(stage, *groups),
    )
