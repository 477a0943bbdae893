"""Which number formats a run computes in."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

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
