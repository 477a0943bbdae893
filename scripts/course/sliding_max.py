"""The maximum over a sliding window: operations and bytes of three algorithms on a CPU, and of two on a GPU."""

import heapq
import time
from collections import deque
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem.planning.targets import parse_target
from scripts.course import Findings, common, main
from scripts.course.panels import Bars
from scripts.course.table import Row, Table

NUMBERS = 1 << 17
WINDOW = 256
OUTPUTS = 512  # results of a block of threads that share the numbers they read


def measure(target: str) -> Findings:
    gpu = parse_target(target).gpu
    assert gpu is not None  # checked by Stop.visit
    rows = list(algorithms(gpu.bandwidth_gb_s * 1e9))
    timed = [row for row in rows if row["here, ms"]]
    return Findings(
        [Table(f"Maximum of each window of {WINDOW} in {NUMBERS:,} numbers on {gpu.name}", rows)],
        {"fewer": requested_bytes("straight") / requested_bytes("shared")},
        [Bars(Table("Sliding maximum, here", timed), ("here, ms",))],
    )


def algorithms(bandwidth: float) -> Iterator[Row]:
    """Operations and bytes of each algorithm, and its time on this machine."""

    def row(name: str, operations: int, size: float | None = None, here: float | None = None) -> Row:
        least = {"bytes, MiB": size and size / 2**20, "least time, ms": size and 1e3 * size / bandwidth}
        return {"algorithm": name, "operations": operations, **least, "here, ms": here and 1e3 * here}

    numbers = np.random.default_rng(0).standard_normal(NUMBERS).astype(np.float32)
    brute = NUMBERS * WINDOW
    # To add a number to a heap of w and remove one: two comparisons for each of log2 w levels.
    operations = {"brute force": brute, "heap": 2 * NUMBERS * int(np.log2(WINDOW)), "monotonic deque": 2 * NUMBERS}
    for name, run in ON_CPU.items():
        start = time.process_time()
        run(numbers.tolist(), WINDOW)
        yield row(f"{name}, one CPU", operations[name], here=time.process_time() - start)
    for kind in ("straight", "shared"):
        yield row(f"GPU, {kind}", brute, requested_bytes(kind))
    yield row("XLA, here", brute, 8 * NUMBERS, common.seconds(jax.jit(by_xla), jnp.asarray(numbers)))


def requested_bytes(kind: str, numbers: int = NUMBERS, window: int = WINDOW) -> float:
    """Bytes of global memory that a kernel reads and writes: with `straight` each thread reads its window; with
    `shared` a block of threads reads the numbers of OUTPUTS windows once, and shares them."""
    read = window if kind == "straight" else 1 + (window - 1) / OUTPUTS
    return 4.0 * (numbers - window + 1) * (read + 1)


def by_xla(x: jax.Array) -> jax.Array:
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (WINDOW,), (1,), "VALID")


def brute_force(x: Sequence[float], window: int) -> list[float]:
    return [max(x[i : i + window]) for i in range(len(x) - window + 1)]


def with_heap(x: Sequence[float], window: int) -> list[float]:
    """Numbers that have left the window are removed when they reach the top."""
    maxima = []
    heap = [(-value, i) for i, value in enumerate(x[: window - 1])]
    heapq.heapify(heap)
    for i in range(window - 1, len(x)):
        heapq.heappush(heap, (-x[i], i))
        while heap[0][1] <= i - window:
            heapq.heappop(heap)
        maxima.append(-heap[0][0])
    return maxima


def with_deque(x: Sequence[float], window: int) -> list[float]:
    """The deque has the indices of decreasing numbers: each is the maximum when all before it have left the window."""
    maxima: list[float] = []
    indices: deque[int] = deque()
    for i, value in enumerate(x):
        while indices and x[indices[-1]] <= value:
            indices.pop()
        indices.append(i)
        if indices[0] <= i - window:
            indices.popleft()
        if i >= window - 1:
            maxima.append(x[indices[0]])
    return maxima


ON_CPU = {"brute force": brute_force, "heap": with_heap, "monotonic deque": with_deque}


if __name__ == "__main__":
    main(__file__)
