"""How new weights are stored: their dtype or quantization format, and which memory they are in."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmem.config.sections import Precision
from jaxmem.quant import FORMATS, QTensor, even_block_size, quantize
from jaxmem.sharding.host import to_host
from jaxmem.sharding.table import Axes

MIN_BLOCK = 16  # least number of values per scale; with fewer, a quantized array could be larger than the original


@dataclass(frozen=True)
class Storage:
    """How a weight is stored between steps."""

    precision: Precision
    double_quant: bool = False  # whether the block scales are quantized too
    on_host: bool = False  # whether matrices are in host memory


def store(w: Float[Array, "*shape"], axes: Axes, storage: Storage) -> jax.Array | QTensor:
    """Returns a new weight, or one layer of it, in the form in which it is stored between steps.

    Matrices are quantized in blocks along the dimension that a matmul sums over: `in` of [in, out], the embedding
    dimension of [vocab, embed]. Vectors, and matrices with fewer than 16 values per column, stay in float32. Optimizers
    treat a quantized weight as bfloat16.
    """
    stored = _converted(w, axes, storage)
    return to_host(stored) if storage.on_host and w.ndim > 1 else stored


def _converted(w: jax.Array, axes: Axes, storage: Storage) -> jax.Array | QTensor:
    precision = storage.precision
    if not precision.is_quantized:
        return w.astype(getattr(jnp, precision.parameters))
    axis = -1 if axes[:1] == ("vocab",) else -2
    if w.ndim < 2 or w.shape[axis] < MIN_BLOCK:
        return w
    limit = precision.block_size or (256 if FORMATS[precision.parameters].bits == 8 else 64)
    size = w.shape[axis]
    block = even_block_size(size, limit) or min(limit, size)
    q = quantize(w, precision.parameters, block, axis, double_quant=storage.double_quant)
    return dataclasses.replace(q, dtype="bfloat16")


_storage: ContextVar[Storage | None] = ContextVar("storage", default=None)


@contextmanager
def storing_as(storage: Storage) -> Iterator[None]:
    """A context in which each weight that a module creates is stored in this form before the next one is created."""
    token = _storage.set(storage)
    try:
        yield
    finally:
        _storage.reset(token)


def store_new(w: Float[Array, "*shape"], axes: Axes) -> jax.Array | QTensor:
    """Returns a weight that a module just created in the form set by `storing_as`; outside of it, unchanged."""
    storage = _storage.get()
    return w if storage is None else store(w, axes, storage)
