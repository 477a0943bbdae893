"""Measures the bandwidth of communication, and finds processes that are slower than the others, before a run.

A step takes as long as its slowest process. Each process times a matmul on its first device and a copy to it; processes
below half of the median are reported. Then all processes all-reduce one array over all devices. On a ring each of n
devices sends 2 (n-1)/n of the bytes, so the reported bandwidth is 2 (n-1)/n x bytes / seconds, the best of several
measurements.
"""

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
SECONDS = 0.3  # shortest measurement of a single process, since other programs may run at the same time
SLOW = 0.5  # a process below this share of the median is slow
SIZES = {"cpu": (256, 1 << 20)}  # rows of the matrix, bytes that are copied and reduced
ACCELERATOR = (4096, 64 << 20)


@dataclass(frozen=True)
class Preflight:
    bytes_per_second: float  # bandwidth of an all-reduce over all devices
    rates: Mapping[str, list[float]]  # {measurement: rate of each process}
    hosts: list[str]

    @property
    def slow(self) -> list[str]:
        """One line for each process far below the others."""
        found = []
        for what, rates in self.rates.items():
            median = statistics.median(rates)
            for process, rate in enumerate(rates):
                if rate < SLOW * median:
                    host = f" ({self.hosts[process]})" if self.hosts else ""
                    name = f"process {process} of {len(rates)}{host}"
                    found.append(f"{name} is slow: {what} at {rate / median:.0%} of the median")
        return found

    def lines(self) -> list[str]:
        count, host_count = len(next(iter(self.rates.values()))), len(set(self.hosts))
        on = f" on {host_count} host{'s' * (host_count > 1)}" if self.hosts else ""
        return [f"{count} processes{on}: all-reduce {self.bytes_per_second / 1e9:.3g} GB/s", *self.slow]


def preflight() -> Preflight:
    """Runs the measurements. All processes call it together."""
    size, count = SIZES.get(jax.default_backend(), ACCELERATOR)
    mine = _local_rates(size, count)
    everyone = gather(mine)
    comm = Communicator()
    values = comm.put(np.ones((jax.local_device_count(), count // 4), np.float32))
    seconds = _best(lambda: comm.allreduce(values))
    return Preflight(
        bytes_per_second=2 * (comm.size - 1) / comm.size * count / seconds,
        rates={what: [one[what] for one in everyone] for what in mine},
        hosts=hosts(),
    )


def _local_rates(size: int, count: int) -> dict[str, float]:
    """FLOPs per second of the first device of this process, and bytes per second of copies to it."""
    device = jax.local_devices()[0]
    a = jax.device_put(np.ones((size, size), np.float32), device)
    multiply = jax.jit(lambda a: a @ a)
    block = np.ones(count, np.uint8)
    return {
        "matmul": 2 * size**3 / _best(lambda: multiply(a), SECONDS),
        "copy": count / _best(lambda: jax.device_put(block, device), SECONDS),
    }


def _best(work: Callable[[], Any], seconds: float = 0.0) -> float:
    """Seconds of the fastest of several runs, without the first one, which compiles."""
    times: list[float] = []
    jax.block_until_ready(work())
    while len(times) < REPEATS or sum(times) < seconds:
        start = time.perf_counter()
        jax.block_until_ready(work())
        times.append(time.perf_counter() - start)
    return min(times)
