"""The maximum over a sliding window: a small problem on which to see what memory costs. `jaxmem tour gpu` shows it.

`HOST` has three algorithms for lists, on one processor.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxmem.kernels.choice import choose

from . import pallas, reference
from .host import HOST

IMPLEMENTATIONS: dict[str, Callable[[jax.Array, int], jax.Array]] = {
    "reference": reference.maximum,
    "shared": pallas.shared,
    "straight": pallas.straight,
}


def sliding_max(x: jax.Array, window: int, *, implementation: str | None = None) -> jax.Array:
    """The largest of each `window` neighbours among n numbers in float32, n - window + 1 results."""
    if x.ndim != 1 or x.dtype != jnp.float32:
        raise ValueError(f"sliding_max: x is {x.dtype} of shape {x.shape}; it should be float32 of one dimension")
    if not 1 <= window <= x.shape[0]:
        raise ValueError(f"sliding_max: window is {window}; it should be from 1 to the {x.shape[0]} numbers of x")
    sizes = (x.shape[0], window)
    chosen = choose("sliding_max", implementation, IMPLEMENTATIONS, portable="reference", kind="float32", sizes=sizes)
    return IMPLEMENTATIONS[chosen.implementation](x, window)


__all__ = ["HOST", "IMPLEMENTATIONS", "sliding_max"]
