"""The RMS norm of a sum, forward and backward in one pass over memory each. `reference.py` says what it computes.

A new implementation is a module with `normed` as in `reference.py`, and a line in IMPLEMENTATIONS.
"""

from __future__ import annotations

from typing import Any

import jax

from jaxmem.kernels.choice import choose

from . import pallas, reference

IMPLEMENTATIONS: dict[str, Any] = {"pallas": pallas, "reference": reference}
DTYPES = ("float32", "bfloat16", "float16")


def rms_norm(
    x: jax.Array,
    scale: jax.Array,
    *,
    residual: jax.Array | None = None,
    epsilon: float = 1e-5,
    implementation: str | None = None,
) -> Any:  # an array, with a residual two
    """x / sqrt(mean x^2 + epsilon) * scale along the last dimension (Zhang and Sennrich, arXiv:1910.07467), in float32.

    With a `residual`: the norm of x + residual, and x + residual. `implementation`: a name in IMPLEMENTATIONS; None
    picks one."""
    _require(x.ndim >= 1 and x.size > 0, f"x has shape {x.shape}; it should be [..., size], of no dimension empty")
    _require(x.dtype.name in DTYPES, f"x is {x.dtype}; it should be one of {', '.join(DTYPES)}")
    _require(scale.shape == x.shape[-1:], f"scale has shape {scale.shape}; it should be {x.shape[-1:]}")
    _require(scale.dtype.name in DTYPES, f"scale is {scale.dtype}; it should be one of {', '.join(DTYPES)}")
    alike = residual is None or (residual.shape == x.shape and residual.dtype == x.dtype)
    _require(alike, f"residual should be {x.dtype} of shape {x.shape}, as x is")
    _require(epsilon >= 0.0, f"epsilon is {epsilon}; it should not be negative")
    sizes = (x.size // x.shape[-1], x.shape[-1])
    names, kind = IMPLEMENTATIONS, x.dtype.name
    chosen = choose("rms_norm", implementation, names, portable="reference", kind=kind, sizes=sizes)
    rows = x.reshape(sizes), None if residual is None else residual.reshape(sizes)
    normal, summed = IMPLEMENTATIONS[chosen.implementation].normed(epsilon, *rows, scale)
    return normal.reshape(x.shape) if residual is None else (normal.reshape(x.shape), summed.reshape(x.shape))


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(f"rms_norm: {message}")


__all__ = ["IMPLEMENTATIONS", "rms_norm"]
