"""Small answers that must be the same in every process, or one would wait in a collective that the others never enter.

All are reductions over one device of each process. A lone process agrees with itself and starts nothing.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any, TypeVar

import jax
import numpy as np

from jaxmem.distributed.communicator import Communicator

Results = TypeVar("Results")


def largest(number: int) -> int:
    """The largest of all processes' numbers. Waits for all of them."""
    return number if jax.process_count() == 1 else int(_cast(number))


def any_of(yes: bool) -> bool:
    """Whether it is so in any process. Waits for all of them."""
    return bool(largest(int(yes)))


def gather(value: Any) -> list[Any]:
    """Every process's JSON value, in order of processes. Waits for all of them."""
    if jax.process_count() == 1:
        return [value]
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    padded = np.full((1, largest(len(text))), ord(" "), np.uint8)
    padded[0, : len(text)] = text
    comm = _processes()
    return [json.loads(bytes(row)) for row in np.asarray(in_order(comm.all_gather(comm.put(padded))))]


class Vote:
    """A number cast at each step, of which the largest counts. It is read one step late, when it has long been
    reduced behind the step: nobody waits for it, and all read the same at the same step."""

    def __init__(self) -> None:
        self._pending: jax.Array | None = None

    def cast(self, number: int) -> int:
        """The largest number of the step before; of a lone process, this one."""
        if jax.process_count() == 1:
            return number
        before, self._pending = self._pending, _cast(number)
        return 0 if before is None else int(before)


def _cast(number: int) -> jax.Array:
    comm = _processes()
    return in_order(comm.allreduce(comm.put(np.array([number], np.int32)), "max"))


def in_order(results: Results) -> Results:
    """What a program of several processes gave, before the next one starts that does not need it. CPUs run such
    programs at once, in any order, and gloo would pair the messages of one with those of the other: there they are
    waited for. Elsewhere a device takes programs in turn, and nobody waits."""
    if jax.process_count() > 1 and jax.default_backend() == "cpu":
        jax.block_until_ready(results)
    return results


@cache
def _processes() -> Communicator:
    first: dict[int, jax.Device] = {}
    for device in jax.devices():
        first.setdefault(device.process_index, device)
    return Communicator([first[process] for process in sorted(first)], "process")
