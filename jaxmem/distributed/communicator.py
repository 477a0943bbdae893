"""The textbook collectives over one mesh axis, for code on the host and for teaching.

Each device along the axis is a participant with its own value: an array [participants, ...] whose first dimension is
sharded over the axis. The checks at the start of a run use this module (`agree`, `preflight`). The training step does
not: XLA's partitioner derives its collectives from shardings. For a value of B bytes and n participants, on a ring
(Patarasuk and Yuan, 2009) a device sends 2 B (n-1)/n for `allreduce`, B (n-1) for `all_gather` of n such values, and
B (n-1)/n for `reduce_scatter`, the first half of an all-reduce. `broadcast` is an all-reduce in which all devices
except the root add 0.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxmem.sharding import first_dim_sharding

Op = Literal["sum", "max", "mean"]
_REDUCE: dict[Op, Callable[..., jax.Array]] = {"sum": jax.lax.psum, "max": jax.lax.pmax, "mean": jax.lax.pmean}


class Communicator:
    """Collectives over one axis of devices.

    >>> comm = Communicator(jax.devices()[:2])
    >>> values = comm.put(np.arange(4.0, dtype=np.float32).reshape(2, 2))  # [0, 1] on the first, [2, 3] on the second
    >>> comm.allreduce(values).tolist(), comm.allreduce(values, "max").tolist()
    ([2.0, 4.0], [2.0, 3.0])
    >>> comm.all_gather(values).shape, comm.reduce_scatter(values, "mean").tolist()
    ((2, 2), [[1.0], [2.0]])
    """

    def __init__(self, where: Mesh | Sequence[jax.Device] | None = None, axis: str = "rank") -> None:
        """A communicator over an axis of a mesh, or over these devices (by default all). Every process with one of the
        devices must make the same calls in the same order."""
        if not isinstance(where, Mesh):
            where = Mesh(np.asarray(jax.devices() if where is None else where, dtype=object), (axis,))
        if axis not in where.axis_names:
            raise ValueError(f"unknown axis {axis!r}; the mesh has {', '.join(where.axis_names)}")
        self.mesh = where
        self.axis = axis
        self.size = where.shape[axis]

    def put(self, values: Any) -> jax.Array:
        """Copies [participants of this process, ...], in order, to the devices; returns [participants, ...]."""
        values = np.asarray(values)
        shape = (self.size, *values.shape[1:])
        return jax.make_array_from_process_local_data(first_dim_sharding(self.mesh, self.axis), values, shape)

    def allreduce(self, values: jax.Array, op: Op = "sum") -> jax.Array:
        """Reduces [participants, ...] to [...], replicated."""
        return _compiled(self.mesh, self.axis, "allreduce", op)(values)

    def all_gather(self, values: jax.Array) -> jax.Array:
        """Gathers [participants, ...], replicated."""
        return _compiled(self.mesh, self.axis, "all_gather")(values)

    def reduce_scatter(self, values: jax.Array, op: Op = "sum") -> jax.Array:
        """Reduces [participants, length, ...] to [participants, length / participants, ...]: each participant has a
        part of the sum."""
        if values.ndim < 2 or values.shape[1] % self.size:
            raise ValueError(f"values of shape {values.shape}: dimension 1 is not divisible by {self.size}")
        return _compiled(self.mesh, self.axis, "reduce_scatter", op)(values)

    def broadcast(self, values: jax.Array, root: int = 0) -> jax.Array:
        """Replicates the value [...] of `root`."""
        if not 0 <= root < self.size:
            raise ValueError(f"unknown root {root}; expected 0 to {self.size - 1}")
        return _compiled(self.mesh, self.axis, "broadcast", root)(values)


@lru_cache(maxsize=256)
def _compiled(mesh: Mesh, axis: str, collective: str, option: Any = None) -> Any:
    """The program of all participants. `option`: the reduction, or the root of a broadcast."""
    size = mesh.shape[axis]
    scattered = collective == "reduce_scatter"

    def local(values: jax.Array) -> jax.Array:
        x = values[0]
        if collective == "all_gather":
            return jax.lax.all_gather(x, axis)
        if collective == "broadcast":
            is_root = jax.lax.axis_index(axis) == option
            return jax.lax.psum(jnp.where(is_root, x, jnp.zeros_like(x)), axis)
        if not scattered:
            return _REDUCE[option](x, axis)
        if option == "max":  # jax has no reduce-scatter by maximum: all-to-all, then a local maximum
            parts = x.reshape(size, -1, *x.shape[1:])
            return jnp.max(jax.lax.all_to_all(parts, axis, 0, 0), axis=0)[None]
        part = jax.lax.psum_scatter(x, axis, tiled=True)
        return (part / size if option == "mean" else part)[None]

    out = first_dim_sharding(mesh, axis if scattered else None).spec
    return jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=first_dim_sharding(mesh, axis).spec, out_specs=out, check_vma=False)
    )
