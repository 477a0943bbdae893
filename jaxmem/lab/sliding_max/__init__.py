"""The maximum over a sliding window: a small problem on which to see what memory costs. `jaxmem tour gpu` shows it.

`HOST` has three algorithms for lists, on one processor.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jaxmem.kernels.choice import Operation
from jaxmem.kernels.validation import Validator

from . import triton
from .host import HOST


class SlidingMaxShape(NamedTuple):
    """The number of values and of those in a window."""

    numbers: int
    window: int

    @property
    def least_bytes(self) -> int:
        """Each number read once, each result written once."""
        return 4 * (2 * self.numbers - self.window + 1)


SHAPES = {"256 of 64 M": SlidingMaxShape(1 << 26, 256)}  # for benchmarks


def by_xla(x: Float[Array, "numbers"], window: int) -> Float[Array, "windows"]:
    least = np.array(-np.inf, x.dtype)  # numpy's: jax then recognizes a maximum, which has a gradient
    return jax.lax.reduce_window(x, least, jax.lax.max, (window,), (1,), "VALID")


IMPLEMENTATIONS: dict[str, Callable[[jax.Array, int], jax.Array]] = {
    "reference": by_xla,
    "shared": partial(triton.maximum, kind="shared"),
    "straight": partial(triton.maximum, kind="straight"),
}


def sliding_max(x: ArrayLike, window: int, *, implementation: str | None = None) -> jax.Array:
    """The largest of each `window` neighbours among n numbers in float32, n - window + 1 results; NaN where a window
    contains NaN. `reference` has a gradient."""
    checks = Validator("sliding_max")
    x = checks.array("x", x, "[numbers]", ("float32",))
    window = checks.whole_number("window", window)
    fits = f"window is {window}; it should be from 1 to the {x.shape[0]} numbers of x"
    checks.require(1 <= window <= x.shape[0], fits)
    return Operation("sliding_max", IMPLEMENTATIONS, "reference").run(
        implementation, lambda maximum: maximum(x, window), (x,), kind="float32", sizes=(x.shape[0], window)
    )


__all__ = ["HOST", "IMPLEMENTATIONS", "SHAPES", "SlidingMaxShape", "sliding_max"]
