"""The collectives of the textbooks, over one mesh axis, for code on the host and for teaching.

Each device along the axis is a participant with a value of its own: an array [participants, ...] whose first
dimension is split over the axis. Training does not use this: there XLA's partitioner derives the collectives from
where arrays lie (`sharding`). For a value of B bytes and n participants, a device sends, on a ring (Patarasuk and
Yuan, 2009), 2 B (n-1)/n for `allreduce`, B (n-1) for `all_gather` of n such values, and B (n-1)/n for
`reduce_scatter`, which is the first half of an all-reduce. `broadcast` is an all-reduce in which all others add 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxmem.sharding import first_dim_sharding

Op = Literal["sum", "max", "mean"]
_Part = Callable[[jax.Array], jax.Array]  # what one participant does with its value; hashable, compiled once


class Communicator:
    """
    >>> comm = Communicator(jax.devices()[:2])
    >>> values = comm.put(np.arange(4.0, dtype=np.float32).reshape(2, 2))  # [0, 1] at the first, [2, 3] at the second
    >>> comm.allreduce(values).tolist(), comm.allreduce(values, "max").tolist()
    ([2.0, 4.0], [2.0, 3.0])
    >>> comm.all_gather(values).shape, comm.reduce_scatter(values, "mean").tolist()
    ((2, 2), [[1.0], [2.0]])
    """

    def __init__(self, where: Mesh | Sequence[jax.Device] | None = None, axis: str = "rank") -> None:
        """Over an axis of a mesh, or over these devices in a row; by default all. Every process that holds one of
        them makes the same calls in the same order."""
        if not isinstance(where, Mesh):
            where = Mesh(np.asarray(jax.devices() if where is None else where, dtype=object), (axis,))
        if axis not in where.axis_names:
            raise ValueError(f"axis {axis!r}: the mesh has {', '.join(where.axis_names)}")
        self.mesh, self.axis, self.size = where, axis, where.shape[axis]
        self._each = first_dim_sharding(where, axis)

    def put(self, values: Any) -> jax.Array:
        """[participants of this process, ...], in order, to the devices: [participants, ...]."""
        values = np.asarray(values)
        shape = (self.size, *values.shape[1:])
        return jax.make_array_from_process_local_data(self._each, values, shape)

    def allreduce(self, values: jax.Array, op: Op = "sum") -> jax.Array:
        """[participants, ...] to [...], the same at each."""
        return self._run(_Reduce(self.axis, op), values)

    def all_gather(self, values: jax.Array) -> jax.Array:
        """[participants, ...], whole at each."""
        return self._run(_Gather(self.axis), values)

    def reduce_scatter(self, values: jax.Array, op: Op = "sum") -> jax.Array:
        """[participants, length, ...] to [participants, length / participants, ...]: each keeps its part of the sum."""
        if values.ndim < 2 or values.shape[1] % self.size:
            raise ValueError(f"values of shape {values.shape}: dimension 1 does not divide over {self.size}")
        return self._run(_Scatter(self.axis, op, self.size), values, out=self.axis)

    def broadcast(self, values: jax.Array, root: int = 0) -> jax.Array:
        """[participants, ...] to the [...] of one of them, at each."""
        if not 0 <= root < self.size:
            raise ValueError(f"root {root}: there are {self.size} participants")
        return self._run(_Broadcast(self.axis, root), values)

    def _run(self, part: _Part, values: jax.Array, out: str | None = None) -> jax.Array:
        return _compiled(self.mesh, self.axis, part, out)(values)


@lru_cache(maxsize=256)
def _compiled(mesh: Mesh, axis: str, part: _Part, out: str | None) -> Any:
    """One participant's part as a program of all."""

    def local(values: jax.Array) -> jax.Array:
        result = part(values[0])
        return result[None] if out else result

    before, after = first_dim_sharding(mesh, axis).spec, first_dim_sharding(mesh, out).spec
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=before, out_specs=after, check_vma=False))


@dataclass(frozen=True)
class _Reduce:
    axis: str
    op: Op

    def __call__(self, x: jax.Array) -> jax.Array:
        return {"sum": jax.lax.psum, "max": jax.lax.pmax, "mean": jax.lax.pmean}[self.op](x, self.axis)


@dataclass(frozen=True)
class _Gather:
    axis: str

    def __call__(self, x: jax.Array) -> jax.Array:
        return jax.lax.all_gather(x, self.axis)


@dataclass(frozen=True)
class _Scatter:
    axis: str
    op: Op
    size: int

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.op == "max":  # no network reduces to parts by maximum: exchange the parts, then compare
            parts = x.reshape(self.size, -1, *x.shape[1:])
            return jnp.max(jax.lax.all_to_all(parts, self.axis, 0, 0), axis=0)
        part = jax.lax.psum_scatter(x, self.axis, tiled=True)
        return part / self.size if self.op == "mean" else part


@dataclass(frozen=True)
class _Broadcast:
    axis: str
    root: int

    def __call__(self, x: jax.Array) -> jax.Array:
        mine = jax.lax.axis_index(self.axis) == self.root
        return jax.lax.psum(jnp.where(mine, x, jnp.zeros_like(x)), self.axis)
