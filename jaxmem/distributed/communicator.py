"""The textbook collectives over one mesh axis, for code on the host and for teaching.

Each device along the axis is a participant with its own value: an array [participants, ...] whose first dimension is
sharded over the axis. The checks at the start of a run use this module (`agree`, `preflight`). The training step does
not: XLA's partitioner derives its collectives from shardings. For a value of B bytes and n participants, on a ring
(Patarasuk and Yuan, 2009) a device sends 2 B (n-1)/n for `allreduce` and B (n-1) for `all_gather` of n such values.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Literal

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh

from jaxmem.sharding.layout import first_dim_sharding

Op = Literal["sum", "max", "mean"]
_REDUCE: dict[Op, Callable[..., jax.Array]] = {"sum": jax.lax.psum, "max": jax.lax.pmax, "mean": jax.lax.pmean}


class Communicator:
    """Collectives over one axis of devices.

    >>> comm = Communicator(jax.devices()[:2])
    >>> values = comm.put(np.arange(4.0, dtype=np.float32).reshape(2, 2))  # [0, 1] on the first, [2, 3] on the second
    >>> comm.allreduce(values).tolist(), comm.allreduce(values, "max").tolist()
    ([2.0, 4.0], [2.0, 3.0])
    >>> comm.all_gather(values).shape
    (2, 2)
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

    def put(self, values: npt.ArrayLike) -> jax.Array:
        """Copies [participants of this process, ...], in order, to the devices; returns [participants, ...]."""
        values = np.asarray(values)
        shape = (self.size, *values.shape[1:])
        return jax.make_array_from_process_local_data(first_dim_sharding(self.mesh, self.axis), values, shape)

    def allreduce(self, values: jax.Array, op: Op = "sum") -> jax.Array:
        """Reduces [participants, ...] to [...], replicated."""
        return _compiled(self.mesh, self.axis, _REDUCE[op])(values)

    def all_gather(self, values: jax.Array) -> jax.Array:
        """Gathers [participants, ...], replicated."""
        return _compiled(self.mesh, self.axis, jax.lax.all_gather)(values)


@lru_cache(maxsize=256)
def _compiled(mesh: Mesh, axis: str, collective: Callable[..., jax.Array]) -> Callable[[jax.Array], jax.Array]:
    """The program of all participants."""
    of_participants = first_dim_sharding(mesh, axis).spec
    replicated = first_dim_sharding(mesh, None).spec

    def local(values: jax.Array) -> jax.Array:
        return collective(values[0], axis)

    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=of_participants, out_specs=replicated, check_vma=False))
