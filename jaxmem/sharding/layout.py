"""A mesh and its sharding tables, which determine the sharding of an array from its role, axes and shape."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Self

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxmem.config import MESH_AXES, Config
from jaxmem.errors import UserError, nearest
from jaxmem.sharding.table import Axes, Axis, Role, ShardingTables, Table, assign_mesh_axes, axis_name, tables_for


@dataclass(frozen=True)
class Layout:
    """A mesh and its sharding rules. `constrain` and `gather` take effect within `with layout:`."""

    mesh: Any  # a Mesh; within a `jax.shard_map` its AbstractMesh
    tables: ShardingTables
    vmapped: tuple[str, ...] = ()  # mesh axes of an enclosing `jax.vmap(..., spmd_axis_name=)`
    vocab_over: tuple[str, ...] = ()  # mesh axes of an enclosing `jax.shard_map` that shard the vocabulary

    def __enter__(self) -> Self:
        _stack.set((*_stack.get(), self))
        return self

    def __exit__(self, *_: object) -> None:
        _stack.set(_stack.get()[:-1])

    def sharding(self, role: Role, axes: Axes, shape: Sequence[int], name: str = "array") -> NamedSharding:
        """The sharding of an array in this role. A dimension that is not divisible by its mesh axes is an error that
        names the array, except for `Axis.if_even`."""
        table: Table = getattr(self.tables, role)
        if len(axes) != len(shape):
            raise UserError(
                f"{name}: shape {tuple(shape)} has {len(shape)} dimensions but axes {axes} name {len(axes)}"
            )
        known = [None if axis is None else axis_name(axis) for axis in axes]
        for axis in known:
            if axis is not None and axis not in table:
                raise UserError(f"{name}: no rule for logical axis {axis!r} among {role}{nearest(axis, table)}")
        spec: list[tuple[str, ...] | None] = []
        split = assign_mesh_axes(axes, shape, table, self.mesh.shape)
        for dim, (axis, over, size) in enumerate(zip(known, split, shape, strict=True)):
            count = self.size(over)
            if size % count:
                mesh = " x ".join(f"mesh.{a}" for a in over)
                raise UserError(
                    f"{name}: dimension {dim} ({axis}) of size {size} is not divisible by {mesh} = {count}; change one"
                )
            spec.append(over or None)
        return NamedSharding(self.mesh, PartitionSpec(*spec))

    def over(self, role: Role, axis: str | Axis | None) -> tuple[str, ...]:
        """The mesh axes of more than one device that shard a logical axis."""
        table: Table = getattr(self.tables, role)
        return tuple(a for a in table[axis_name(axis)] if self.mesh.shape[a] > 1) if axis else ()

    def shard_count(self, role: Role, axis: str | Axis | None) -> int:
        """The number of shards of a logical axis."""
        return self.size(self.over(role, axis))

    def mesh_axes_each(self, role: Role, axes: Axes) -> list[tuple[str, ...]]:
        """The mesh axes of more than one device that shard each dimension of an array with divisible sizes."""
        table: Table = getattr(self.tables, role)
        split = assign_mesh_axes(axes, [0] * len(axes), table, self.mesh.shape)
        return [tuple(a for a in over if self.mesh.shape[a] > 1) for over in split]

    def spec(self, role: Role, axes: Axes) -> PartitionSpec:
        """The PartitionSpec for `jax.shard_map`."""
        return PartitionSpec(*(over or None for over in self.mesh_axes_each(role, axes)))

    def padded(self, role: Role, axes: Axes, shape: Sequence[int]) -> tuple[int, ...]:
        """The smallest shape that is at least this shape and divisible by the mesh axes."""
        counts = [self.shard_count(role, axis) for axis in axes]
        return tuple(-(-size // count) * count for size, count in zip(shape, counts, strict=True))

    def with_unsplit_layers(self, role: Role, axes: Axes, shape: Sequence[int]) -> NamedSharding:
        """The sharding of a stack whose layers must not be distributed over stages: another dimension is sharded over
        `stage`, if one is divisible."""
        unsplit = dataclasses.replace(self.tables, **{role: {**getattr(self.tables, role), "layer": ()}})
        placed = Layout(self.mesh, unsplit).sharding(role, axes, shape)
        shard_shape = placed.shard_shape(tuple(shape))
        spec = list(placed.spec)
        for dim in range(1, len(shape)):
            if shard_shape[dim] % self.mesh.shape["stage"] == 0:
                over = spec[dim] or ()
                spec[dim] = (*((over,) if isinstance(over, str) else over), "stage")
                break
        return NamedSharding(self.mesh, PartitionSpec(*spec))

    @property
    def local_gradient_axes(self) -> tuple[str, ...]:
        """The mesh axes that shard the batch, but neither gradients nor computed weights: devices along them accumulate
        the gradients of their own rows, and reduce them once per update."""
        tables = self.tables
        taken = {axis for table in (tables.gradients, tables.compute) for over in table.values() for axis in over}
        return tuple(axis for axis in self.over("activations", "batch") if axis not in taken)

    def inside_vmap(self, vmapped: tuple[str, ...]) -> Layout:
        """The layout for code inside of `jax.vmap(..., spmd_axis_name=vmapped)` over groups of rows."""
        tables = dataclasses.replace(self.tables, activations=self.tables.without(vmapped).activations)
        return dataclasses.replace(self, tables=tables, vmapped=vmapped)

    def inside_shard_map(self, manual: tuple[str, ...]) -> Layout:
        """The layout for code inside of a `jax.shard_map` over these mesh axes, in which arrays are shards."""
        mesh = self.mesh.abstract_mesh.update_axis_types(dict.fromkeys(manual, AxisType.Manual))
        vocab_over = tuple(a for a in self.over("weights", "vocab") if a in manual)
        return Layout(mesh, self.tables.without(manual), (), vocab_over)

    def without(self, *axes: str) -> Layout:
        """The layout for code in which the shards along these mesh axes are separate arrays."""
        return dataclasses.replace(self, tables=self.tables.without(axes))

    def size(self, axes: Sequence[str]) -> int:
        return math.prod(self.mesh.shape[axis] for axis in axes)

    def for_generation(self, rows: int) -> Layout:
        """The layout for generation. Sequences grow, so their dimension is not sharded; the batch is sharded if its
        size is divisible."""
        batch = () if rows % self.shard_count("activations", "batch") else self.tables.activations["batch"]
        unsplit = dict.fromkeys(("time", "stream", "mlp_time", "vocab_time"), ())
        logits = tuple(axis for axis in self.tables.activations["vocab_batch"] if axis in batch)
        activations = {**self.tables.activations, **unsplit, "batch": batch, "vocab_batch": logits}
        return Layout(self.mesh, dataclasses.replace(self.tables, activations=activations))

    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())


_stack: ContextVar[tuple[Layout, ...]] = ContextVar("layouts", default=())


def current() -> Layout | None:
    """The layout of the innermost active `with layout:`; None outside of any."""
    layouts = _stack.get()
    return layouts[-1] if layouts else None


def shard_axes(role: Role, axis: str | Axis | None) -> tuple[str, ...]:
    """The mesh axes of more than one device that shard a logical axis."""
    layout = current()
    return () if layout is None else layout.over(role, axis)


def shard_count(role: Role, axis: str | Axis | None) -> int:
    """The number of shards of a logical axis."""
    layout = current()
    return 1 if layout is None else layout.shard_count(role, axis)


def layout_for(cfg: Config, devices: Sequence[jax.Device]) -> Layout:
    """The mesh of a config without `-1`, over these devices in order."""
    shape = tuple(getattr(cfg.mesh, axis) for axis in MESH_AXES)
    grid = np.asarray(devices, dtype=object).reshape(shape)
    mesh = Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))
    return Layout(mesh, tables_for(cfg))


def first_dim_sharding(mesh: Mesh, axis: str | None) -> NamedSharding:
    """The first dimension sharded over one axis of any mesh; None: replicated."""
    return NamedSharding(mesh, PartitionSpec(axis) if axis else PartitionSpec())
