"""The maximum over a sliding window: a small problem on which to see what memory costs.

`python scripts/course/gpu.py` shows it.

`HOST` has three algorithms for lists on one processor. For n numbers and a window of w, brute force needs n w
comparisons. A heap needs at most n log n: numbers that have left the window are removed when they reach the top (at
most 2 n numbers are stored). A monotonic deque needs at most 2 n, and stores w numbers.

Of the Triton kernels, `straight` reads the w numbers of each window from global memory: it requests 4 w bytes per
result, which caches mostly serve. In `shared` a program computes OUTPUTS results and reads each of the
OUTPUTS + w - 1 numbers that they need once: 4 (1 + (w - 1) / OUTPUTS) bytes per result. Its threads share these numbers
through shared memory. Both kernels need n w comparisons; they differ in the memory that they read.
"""

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jaxmem.kernels.choice import Operation
from jaxmem.kernels.triton_launch import Launch, launch, load_programs
from jaxmem.kernels.validation import Validator

OUTPUTS = 512  # results of a program of `shared`
STRIP_WIDTH = 16  # numbers that a program compares with all of its results at once


class SlidingMaxShape(NamedTuple):
    """The number of values, and of values in a window."""

    numbers: int
    window: int

    @property
    def least_bytes(self) -> int:
        """Each number read once, each result written once."""
        return 4 * (2 * self.numbers - self.window + 1)


SHAPES = {"256 of 64 M": SlidingMaxShape(1 << 26, 256)}  # for benchmarks

# ---------------------------------------------------------------- on one processor


def brute_force(x: Sequence[float], window: int) -> list[float]:
    return [max(x[i : i + window]) for i in range(len(x) - window + 1)]


def with_heap(x: Sequence[float], window: int) -> list[float]:
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


HOST = {"brute force": brute_force, "heap": with_heap, "monotonic deque": with_deque}

# ---------------------------------------------------------------- on a device


def by_xla(x: Float[Array, "numbers"], window: int) -> Float[Array, "windows"]:
    least = np.array(-np.inf, x.dtype)  # of numpy, so that jax recognizes a maximum, which has a gradient
    return jax.lax.reduce_window(x, least, jax.lax.max, (window,), (1,), "VALID")


@dataclass(frozen=True)
class WindowStatic:
    """Compile-time values of the Triton programs."""

    numbers: int
    window: int
    outputs: int = OUTPUTS
    strip: int = STRIP_WIDTH


def by_triton(x: Float[Array, "numbers"], window: int, *, kind: str) -> Float[Array, "windows"]:
    """Computed by the program `sliding_max_<kind>`."""
    count = x.shape[0] - window + 1
    (maxima,) = launch(
        getattr(load_programs("scripts.course.sliding_max.triton_programs"), f"sliding_max_{kind}"),
        [x],
        [jax.ShapeDtypeStruct((count,), x.dtype)],
        Launch(grid=(-(-count // OUTPUTS),), static=WindowStatic(x.shape[0], window), stages=2),
    )
    return maxima


def requested_bytes(kind: str, numbers: int, window: int) -> float:
    """Bytes of global memory that a Triton kernel reads and writes."""
    read = window if kind == "straight" else 1 + (window - 1) / OUTPUTS
    return 4.0 * (numbers - window + 1) * (read + 1)


IMPLEMENTATIONS: dict[str, Callable[[jax.Array, int], jax.Array]] = {
    "reference": by_xla,
    "shared": partial(by_triton, kind="shared"),
    "straight": partial(by_triton, kind="straight"),
}


def sliding_max(x: ArrayLike, window: int, *, implementation: str | None = None) -> jax.Array:
    """The maximum of each `window` consecutive values of x [n], float32: n - window + 1 results; NaN where a window
    contains NaN. Only `reference` has a gradient."""
    checks = Validator("sliding_max")
    x = checks.array("x", x, "[numbers]", ("float32",))
    window = checks.whole_number("window", window)
    checks.require(
        1 <= window <= x.shape[0], f"window is {window}; it should be from 1 to {x.shape[0]}, the length of x"
    )
    return Operation("sliding_max", IMPLEMENTATIONS, "reference").run(
        implementation, lambda maximum: maximum(x, window), (x,)
    )
