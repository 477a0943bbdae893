"""The maximum over a sliding window: a small problem on which to see what memory costs. `jaxmem tour gpu` shows it.

`HOST` has three algorithms for lists, on one processor.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax.typing import ArrayLike

from jaxmem.kernels import choice
from jaxmem.kernels.given import Given

from . import pallas, reference
from .host import HOST

IMPLEMENTATIONS: dict[str, Callable[[jax.Array, int], jax.Array]] = {
    "reference": reference.maximum,
    "shared": pallas.shared,
    "straight": pallas.straight,
}


def sliding_max(x: ArrayLike, window: int, *, implementation: str | None = None) -> jax.Array:
    """The largest of each `window` neighbours among n numbers in float32, n - window + 1 results; NaN of those with a
    NaN. `reference` has a gradient."""
    given = Given("sliding_max")
    x = given.array("x", x, "[numbers]", ("float32",))
    window = given.whole("window", window)
    given.require(
        1 <= window <= x.shape[0], f"window is {window}; it should be from 1 to the {x.shape[0]} numbers of x"
    )
    return choice.run(
        "sliding_max",
        implementation,
        IMPLEMENTATIONS,
        lambda maximum: maximum(x, window),
        (x,),
        portable="reference",
        kind="float32",
        sizes=(x.shape[0], window),
    )


__all__ = ["HOST", "IMPLEMENTATIONS", "sliding_max"]
