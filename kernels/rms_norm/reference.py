"""The norm as its definition reads, in plain JAX: the contract; runs wherever XLA does.

XLA reads a row once for its mean and again to divide by it: forward a quarter more bytes than there are, backward
twice as many (`scripts/measure/fusion_bytes.py`).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Rows = Float[Array, "rows size"]


def normed(
    epsilon: float, x: Rows, residual: Rows | None, scale: Float[Array, "size"]
) -> tuple[Float[Array, "rows size"], Float[Array, "rows size"]]:
    """The norm of the sum, and the sum."""
    summed = x if residual is None else x + residual
    wide = summed.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon)
    return (wide * scale.astype(jnp.float32)).astype(x.dtype), summed
