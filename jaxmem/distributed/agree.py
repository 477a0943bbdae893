"""Small values that must be equal in all processes; otherwise one could wait in a collective that others never enter.

All functions are reductions over one device of each process; a single process communicates nothing. The functions of
`jax.experimental.multihost_utils` block, and need arrays of equal shape; their results cannot be read a step later.
"""

import json
from functools import cache
from typing import TypeVar

import jax
import numpy as np

from jaxmem.distributed.communicator import Communicator

Results = TypeVar("Results")
Value = TypeVar("Value")


def maximum(number: int) -> int:
    """The largest number of all processes. Waits for all of them."""
    return number if jax.process_count() == 1 else int(_max(number))


def any_process(yes: bool) -> bool:
    """Whether `yes` is true in any process. Waits for all of them."""
    return bool(maximum(int(yes)))


def gather_objects(value: Value) -> list[Value]:
    """The JSON values of all processes, in order of the processes. Waits for all of them."""
    if jax.process_count() == 1:
        return [value]
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    padded = np.full((1, maximum(len(text))), ord(" "), np.uint8)
    padded[0, : len(text)] = text
    comm = _processes()
    return [json.loads(bytes(row)) for row in np.asarray(serialized(comm.all_gather(comm.put(padded))))]


class DelayedMax:
    """The maximum over all processes, read one step late. It is reduced after the step is dispatched, so no process
    waits, and all processes read the same value at the same step."""

    def __init__(self) -> None:
        self._pending: jax.Array | None = None

    def of(self, number: int) -> int:
        """The largest number of the previous step; in a single process, `number` itself."""
        if jax.process_count() == 1:
            return number
        before = self._pending
        self._pending = _max(number)
        return 0 if before is None else int(before)


def _max(number: int) -> jax.Array:
    comm = _processes()
    return serialized(comm.allreduce(comm.put(np.array([number], np.int32)), "max"))


def serialized(results: Results) -> Results:
    """Returns the results of a program with communication when an independent program may start. On CPUs this waits for
    the results, because CPUs run such programs concurrently in any order, and gloo would mix up their messages. Other
    devices run programs in order, so this does not wait."""
    if jax.process_count() > 1 and jax.default_backend() == "cpu":
        jax.block_until_ready(results)
    return results


@cache
def _processes() -> Communicator:
    first: dict[int, jax.Device] = {}
    for device in jax.devices():
        first.setdefault(device.process_index, device)
    return Communicator([first[process] for process in sorted(first)], "process")
