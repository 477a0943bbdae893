"""The RMS norm of a sum, forward and backward in one pass over memory each. `reference.py` says what it computes.

A new implementation is a module with `normed` as in `reference.py`, and a line in IMPLEMENTATIONS.
"""

from __future__ import annotations

from typing import Any

from jax.typing import ArrayLike

from jaxmem.kernels import choice
from jaxmem.kernels.given import FLOATS, Given

from . import pallas, reference

IMPLEMENTATIONS: dict[str, Any] = {"pallas": pallas, "reference": reference}
GIVEN = Given("rms_norm")


def rms_norm(
    x: ArrayLike,
    scale: ArrayLike,
    *,
    residual: ArrayLike | None = None,
    epsilon: float = 1e-5,
    implementation: str | None = None,
) -> Any:  # an array, with a residual two
    """x / sqrt(mean x^2 + epsilon) * scale along the last dimension (Zhang and Sennrich, arXiv:1910.07467), in float32.

    With a `residual`: the norm of x + residual, and x + residual. `implementation`: a name in IMPLEMENTATIONS; None
    picks one."""
    x, scale = GIVEN.array("x", x, "[..., size]", FLOATS), GIVEN.array("scale", scale, None, FLOATS)
    GIVEN.require(scale.shape == x.shape[-1:], f"scale has shape {scale.shape}; it should be {x.shape[-1:]}")
    if residual is not None:
        residual = GIVEN.array("residual", residual)
        alike = residual.shape == x.shape and residual.dtype == x.dtype
        GIVEN.require(alike, f"residual should be {x.dtype} of shape {x.shape}, as x is")
    least = GIVEN.number("epsilon", epsilon)
    GIVEN.require(least >= 0.0, f"epsilon is {least}; it should not be negative")
    sizes = (x.size // x.shape[-1], x.shape[-1])
    normal, summed = choice.run(
        "rms_norm",
        implementation,
        IMPLEMENTATIONS,
        lambda way: way.normed(least, x.reshape(sizes), None if residual is None else residual.reshape(sizes), scale),
        (x, scale, residual),
        portable="reference",
        kind=x.dtype.name,
        sizes=sizes,
    )
    return normal.reshape(x.shape) if residual is None else (normal.reshape(x.shape), summed.reshape(x.shape))


__all__ = ["IMPLEMENTATIONS", "rms_norm"]
