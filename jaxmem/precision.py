"""Which number formats a run computes in, and how numbers are brought into them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Key

from jaxmem.config import Precision

Params = dict[str, Any]  # arrays by name, nested as the modules are


def compute_dtype(precision: Precision, platform: str) -> np.dtype:
    """What matrix products run in. `auto`: bfloat16 where the hardware has it, float32 on a CPU, which does not.

    Normalisation, softmax and losses stay in float32 under every setting.
    """
    if precision.compute == "auto":
        return np.dtype(jnp.float32 if platform == "cpu" else jnp.bfloat16)
    return np.dtype(getattr(jnp, precision.compute))


def stored(params: Params, precision: Precision) -> Params:
    """The weights as they rest between steps."""
    dtype = getattr(jnp, precision.parameters)
    return jax.tree.map(lambda w: w.astype(dtype), params)


def rounded(x: Float[Array, "*shape"], dtype: DTypeLike, key: Key[Array, ""] | None = None) -> Float[Array, "*shape"]:
    """`x` in `dtype`, to the nearest; with a key stochastically: drawn between its two neighbours in bfloat16 so that
    the mean is x. An update too small to move a weight then moves it sometimes, and by the right amount in the mean.

    A random number below the last bit that is kept, added before the rest is cut off (Zamirai et al.,
    arXiv:2010.06192). Which numbers are drawn depends on the key and an element's place, not on the mesh.
    """
    if key is None or x.dtype == dtype:
        return x.astype(dtype)
    if dtype != jnp.bfloat16:
        raise ValueError(f"stochastic rounding is of float32 to bfloat16, not to {jnp.dtype(dtype)}")
    draws = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    moved = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32) + draws
    cut = jax.lax.bitcast_convert_type(moved & jnp.uint32(0xFFFF0000), jnp.float32)
    return jnp.where(jnp.isfinite(x), cut, x).astype(dtype)
