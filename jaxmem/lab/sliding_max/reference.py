"""The maximum over a sliding window as XLA has it: the contract."""

from __future__ import annotations

import jax
import numpy as np
from jaxtyping import Array, Float


def maximum(x: Float[Array, "numbers"], window: int) -> Float[Array, "windows"]:
    least = np.array(-np.inf, x.dtype)  # numpy's, by which jax knows a maximum, and its gradient
    return jax.lax.reduce_window(x, least, jax.lax.max, (window,), (1,), "VALID")
