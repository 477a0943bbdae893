"""The dtypes that a run computes in, and rounding to a narrower dtype."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Key, UInt32

from jaxmem.config.sections import Precision

Params = dict[str, Any]  # weights by name, nested like the modules: arrays or QTensors


def compute_dtype(precision: Precision, platform: str) -> np.dtype:
    """The dtype of matrix multiplications. `auto` is float32 on CPUs, which have no fast bfloat16, and bfloat16
    elsewhere. With `fp8` it is the dtype of everything but the matmuls in FP8.

    Normalization, softmax and losses are always computed in float32.
    """
    if precision.compute == "auto":
        return np.dtype(jnp.float32 if platform == "cpu" else jnp.bfloat16)
    return np.dtype(jnp.bfloat16 if precision.compute == "fp8" else getattr(jnp, precision.compute))


def gradient_dtype(precision: Precision, platform: str) -> np.dtype | None:
    """The dtype of gradients; None: the dtype of each weight."""
    if precision.gradients != "auto":
        return np.dtype(getattr(jnp, precision.gradients))
    if not precision.is_quantized:
        return None
    compute = compute_dtype(precision, platform)
    # float16 would underflow again when the loss scale is divided out, and when an optimizer squares it.
    return np.dtype(jnp.bfloat16) if compute == jnp.float16 else compute


def rounded(x: Float[Array, "*shape"], dtype: DTypeLike, key: Key[Array, ""] | None = None) -> Float[Array, "*shape"]:
    """`x` in `dtype`, rounded to nearest. With a key it is rounded stochastically to one of the two neighbouring
    bfloat16 values with expectation x, so that an update smaller than half a unit in the last place is not always lost.

    A random integer smaller than the last remaining bit is added before the lower bits are removed (Zamirai et al.,
    arXiv:2010.06192). The draw depends on the key and the position of an element, not on the mesh.
    """
    if key is None or x.dtype == dtype:
        return x.astype(dtype)
    if dtype != jnp.bfloat16:
        raise ValueError(f"stochastic rounding supports float32 to bfloat16, not {jnp.dtype(dtype)}")
    noise = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    return rounded_with(noise, x.astype(jnp.float32))


def rounded_with(noise: UInt32[Array, "*shape"], x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """`x` in bfloat16, rounded away from 0 if its lower 16 bits and `noise`, of 16 bits, sum up to more."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) + noise
    truncated = jax.lax.bitcast_convert_type(bits & jnp.uint32(0xFFFF0000), jnp.float32)
    return jnp.where(jnp.isfinite(x), truncated, x).astype(jnp.bfloat16)
