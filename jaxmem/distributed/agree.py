"""Small values that must be equal in every process, or one would wait in a collective that the others never enter.

All are reductions over one device of each process; a lone process starts nothing. `jax.experimental.multihost_utils`
has the blocking ones, for arrays of one shape; it has none that can be read a step later.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any, TypeVar

import jax
import numpy as np

from jaxmem.distributed.communicator import Communicator

Results = TypeVar("Results")


def maximum(number: int) -> int:
    """The largest of all processes' numbers. Waits for all of them."""
    return number if jax.process_count() == 1 else int(_max(number))


def any_process(yes: bool) -> bool:
    """Whether it is true in any process. Waits for all of them."""
    return bool(maximum(int(yes)))


def gather(value: Any) -> list[Any]:
    """Every process's JSON value, in order of processes. Waits for all of them."""
    if jax.process_count() == 1:
        return [value]
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    padded = np.full((1, maximum(len(text))), ord(" "), np.uint8)
    padded[0, : len(text)] = text
    comm = _processes()
    return [json.loads(bytes(row)) for row in np.asarray(serialized(comm.all_gather(comm.put(padded))))]


class DelayedMax:
    """The largest of a number from each process, read one step late: it is reduced behind the step, nobody waits for
    it, and all processes read the same value at the same step."""

    def __init__(self) -> None:
        self._pending: jax.Array | None = None

    def of(self, number: int) -> int:
        """The largest number of the step before; in a lone process, this one."""
        if jax.process_count() == 1:
            return number
        before, self._pending = self._pending, _max(number)
        return 0 if before is None else int(before)


def _max(number: int) -> jax.Array:
    comm = _processes()
    return serialized(comm.allreduce(comm.put(np.array([number], np.int32)), "max"))


def serialized(results: Results) -> Results:
    """The results of a program of several processes, before an independent one starts. CPUs run such programs
    concurrently in any order, and gloo would mix up their messages: there this waits. Other devices run programs in
    order, and nobody waits."""
    if jax.process_count() > 1 and jax.default_backend() == "cpu":
        jax.block_until_ready(results)
    return results


@cache
def _processes() -> Communicator:
    first: dict[int, jax.Device] = {}
    for device in jax.devices():
        first.setdefault(device.process_index, device)
    return Communicator([first[process] for process in sorted(first)], "process")
