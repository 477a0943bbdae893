"""Which number formats a run computes in, and how numbers are brought into them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Key

from jaxmem.config import Precision
from jaxmem.host import to_host
from jaxmem.quant import FORMATS, QTensor, even_block, quantize

Params = dict[str, Any]  # weights by name, nested as the modules are: arrays, and QTensors of those in codes
LEAST = 16  # numbers that share a constant at least, or a code would take more than the number


def compute_dtype(precision: Precision, platform: str) -> np.dtype:
    """What matrix products run in. `auto`: bfloat16 where the hardware has it, float32 on a CPU, which does not.

    Normalisation, softmax and losses stay in float32 under every setting.
    """
    if precision.compute == "auto":
        return np.dtype(jnp.float32 if platform == "cpu" else jnp.bfloat16)
    return np.dtype(getattr(jnp, precision.compute))


@dataclass(frozen=True)
class Rest:
    """How a weight rests."""

    precision: Precision
    double: bool = False  # whether the constants of codes are in codes too
    away: bool = False  # whether matrices lie in host memory


def at_rest(w: Float[Array, "*shape"], axes: tuple[str | None, ...], how: Rest) -> jax.Array | QTensor:
    """A new weight, or one layer of it, as it rests between steps.

    In codes are matrices, in blocks along the dimension that a product sums over: `in` of [in, out], the row of a
    table of tokens. Vectors stay in float32. To an optimizer a weight in codes
    is one in bfloat16.
    """
    made = _in_its_form(w, axes, how)
    return to_host(made) if how.away and w.ndim > 1 else made


def _in_its_form(w: jax.Array, axes: tuple[str | None, ...], how: Rest) -> jax.Array | QTensor:
    precision = how.precision
    if not precision.quantized:
        return w.astype(getattr(jnp, precision.parameters))
    axis = -1 if axes[:1] == ("vocab",) else -2
    if w.ndim < 2 or w.shape[axis] < LEAST:
        return w
    most = precision.block_size or (256 if FORMATS[precision.parameters].bits == 8 else 64)
    size = w.shape[axis]
    q = quantize(w, precision.parameters, even_block(size, most) or min(most, size), axis, double=how.double)
    return dataclasses.replace(q, dtype="bfloat16")


_resting: ContextVar[Rest | None] = ContextVar("resting", default=None)


@contextmanager
def resting(how: Rest) -> Iterator[None]:
    """Weights that are made in here are brought to rest one by one, before the next is made."""
    token = _resting.set(how)
    try:
        yield
    finally:
        _resting.reset(token)


def rested(w: Float[Array, "*shape"], axes: tuple[str | None, ...]) -> jax.Array | QTensor:
    """A weight that was just made; outside of `resting` it stays as it is."""
    how = _resting.get()
    return w if how is None else at_rest(w, axes, how)


def gradient_dtype(precision: Precision, platform: str) -> np.dtype | None:
    """What gradients are held in; None: each in its weight's own dtype."""
    if precision.gradients != "auto":
        return np.dtype(getattr(jnp, precision.gradients))
    return compute_dtype(precision, platform) if precision.quantized else None


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
