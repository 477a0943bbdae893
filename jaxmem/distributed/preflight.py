"""Before hours of training, in seconds: how fast do the devices talk, and is one process much slower than the others.

A step takes as long as its slowest process. Each one multiplies matrices on its first device, alone, and copies to
it; a process below half of the median is named. Then all add up one array over all devices. On a ring each of n
devices sends 2 (n-1)/n of the bytes, so the bandwidth told is 2 (n-1)/n x bytes / seconds, best of a few.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxmem.distributed.agree import gather
from jaxmem.distributed.communicator import Communicator
from jaxmem.distributed.join import hosts

REPEATS = 5
SECONDS = 0.3  # and more of them for so long, where a process measures alone: something else may run beside it
SLOW = 0.5  # of the median
SIZES = {"cpu": (256, 1 << 20)}  # matrix, bytes copied and reduced
ACCELERATOR = (4096, 64 << 20)


@dataclass(frozen=True)
class Preflight:
    bytes_per_second: float  # of an all-reduce over all devices
    rates: Mapping[str, list[float]]  # by what was measured: of each process
    hosts: list[str]

    @property
    def slow(self) -> list[str]:
        """One line for each process far below the others."""
        found = []
        for what, rates in self.rates.items():
            median = statistics.median(rates)
            for process, rate in enumerate(rates):
                if rate < SLOW * median:
                    where = f" ({self.hosts[process]})" if self.hosts else ""
                    found.append(
                        f"process {process} of {len(rates)}{where} is slow: {what} at {rate / median:.0%} of the median"
                    )
        return found

    def lines(self) -> list[str]:
        count = len(next(iter(self.rates.values())))
        hosts = len(set(self.hosts))
        on = f" on {hosts} host{'s' * (hosts > 1)}" if self.hosts else ""
        return [f"{count} processes{on}: all-reduce {self.bytes_per_second / 1e9:.3g} GB/s", *self.slow]


def preflight() -> Preflight:
    """Called by every process at once."""
    size, count = SIZES.get(jax.default_backend(), ACCELERATOR)
    mine = _alone(size, count)
    everyone = gather(mine)
    rates = {what: [one[what] for one in everyone] for what in mine}
    return Preflight(_together(count), rates, hosts())


def _alone(size: int, count: int) -> dict[str, float]:
    """Products and bytes a second of this process's first device."""
    device = jax.local_devices()[0]
    a = jax.device_put(np.ones((size, size), np.float32), device)
    multiply = jax.jit(lambda a: a @ a)
    block = np.ones(count, np.uint8)
    return {
        "multiplying": 2 * size**3 / _best(lambda: multiply(a), SECONDS),
        "copying": count / _best(lambda: jax.device_put(block, device), SECONDS),
    }


def _together(count: int) -> float:
    comm = Communicator()
    values = comm.put(np.ones((jax.local_device_count(), count // 4), np.float32))
    seconds = _best(lambda: comm.allreduce(values))
    return 2 * (comm.size - 1) / comm.size * count / seconds


def _best(work: Callable[[], Any], seconds: float = 0.0) -> float:
    """Seconds of the fastest of a few; the first one, which compiles, does not count."""
    times: list[float] = []
    jax.block_until_ready(work())
    while len(times) < REPEATS or sum(times) < seconds:
        start = time.perf_counter()
        jax.block_until_ready(work())
        times.append(time.perf_counter() - start)
    return min(times)
