"""The maximum over a sliding window: a small problem on which to see what memory costs. `jaxmem tour gpu` shows it.

`HOST` has three algorithms for lists, on one processor.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
from jax.typing import ArrayLike

from jaxmem.kernels.choice import Operation
from jaxmem.kernels.validation import Validator

from . import reference, triton
from .host import HOST

IMPLEMENTATIONS: dict[str, Callable[[jax.Array, int], jax.Array]] = {
    "reference": reference.maximum,
    "shared": partial(triton.maximum, kind="shared"),
    "straight": partial(triton.maximum, kind="straight"),
}


def sliding_max(x: ArrayLike, window: int, *, implementation: str | None = None) -> jax.Array:
    """The largest of each `window` neighbours among n numbers in float32, n - window + 1 results; NaN of those with a
    NaN. `reference` has a gradient."""
    checks = Validator("sliding_max")
    x = checks.array("x", x, "[numbers]", ("float32",))
    window = checks.whole_number("window", window)
    fits = f"window is {window}; it should be from 1 to the {x.shape[0]} numbers of x"
    checks.require(1 <= window <= x.shape[0], fits)
    return Operation("sliding_max", IMPLEMENTATIONS, "reference").run(
        implementation, lambda maximum: maximum(x, window), (x,), kind="float32", sizes=(x.shape[0], window)
    )


__all__ = ["HOST", "IMPLEMENTATIONS", "sliding_max"]
