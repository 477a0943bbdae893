"""Measures the bandwidth of communication, and finds processes that are slower than the others, before a run.

A step takes as long as its slowest process. Each process times a matmul on its first device and a copy to it; processes
below half of the median are reported. Then all processes all-reduce one array over all devices. On a ring each of n
devices sends 2 (n-1)/n of the bytes, so the reported bandwidth is 2 (n-1)/n x bytes / seconds, the best of several
measurements.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from jaxmem.distributed.agree import gather_objects
from jaxmem.distributed.communicator import Communicator
from jaxmem.distributed.join import hosts

REPEATS = 5  # smallest number of measurements of a collective
MIN_SECONDS = 0.3  # shortest measurement of one process, since other programs may run at the same time
SLOW_SHARE = 0.5  # a process below this share of the median rate is slow
SIZES = {"cpu": (256, 1 << 20)}  # (rows of the matrix, bytes that are copied and reduced)
ACCELERATOR = (4096, 64 << 20)


def preflight() -> list[str]:
    """Runs the measurements, and returns the lines of the report. All processes call it together."""
    size, count = SIZES.get(jax.default_backend(), ACCELERATOR)
    device = jax.local_devices()[0]
    a = jax.device_put(np.ones((size, size), np.float32), device)
    block = np.ones(count, np.uint8)
    multiply = jax.jit(lambda a: a @ a)
    comm = Communicator()
    mine = {
        "matmul": 2 * size**3 / _best(lambda: multiply(a), MIN_SECONDS),
        "copy": count / _best(lambda: jax.device_put(block, device), MIN_SECONDS),
    }
    everyone = gather_objects(mine)
    values = comm.put(np.ones((jax.local_device_count(), count // 4), np.float32))
    bandwidth = 2 * (comm.size - 1) / comm.size * count / _best(lambda: comm.allreduce(values))
    return report(bandwidth, {what: [rates[what] for rates in everyone] for what in mine}, hosts())


def report(bandwidth: float, rates: Mapping[str, Sequence[float]], hosts: Sequence[str]) -> list[str]:
    """One line for all processes, and one for each slow process. `bandwidth`: bytes per second of an all-reduce.
    `rates`: for each measurement, the rate of each process."""
    count = len(next(iter(rates.values())))
    host_count = len(set(hosts))
    on = f" on {host_count} host{'s' * (host_count > 1)}" if hosts else ""
    lines = [f"{count} processes{on}: all-reduce {bandwidth / 1e9:.3g} GB/s"]
    for what, of_processes in rates.items():
        median = statistics.median(of_processes)
        for process, rate in enumerate(of_processes):
            if rate < SLOW_SHARE * median:
                host = f" ({hosts[process]})" if hosts else ""
                share = f"{rate / median:.0%} of the median"
                lines.append(f"process {process} of {count}{host} is slow: {what} at {share}")
    return lines


def _best(work: Callable[[], jax.Array], seconds: float = 0.0) -> float:
    """Seconds of the fastest of several runs, after a first run that compiles."""
    times: list[float] = []
    jax.block_until_ready(work())
    while len(times) < REPEATS or sum(times) < seconds:
        start = time.perf_counter()
        jax.block_until_ready(work())
        times.append(time.perf_counter() - start)
    return min(times)
