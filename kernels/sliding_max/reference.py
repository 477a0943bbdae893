"""The maximum over a sliding window as XLA has it: the contract."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def maximum(x: Float[Array, "numbers"], window: int) -> Float[Array, "windows"]:
    return jax.lax.reduce_window(x, jnp.array(-jnp.inf, x.dtype), jax.lax.max, (window,), (1,), "VALID")
