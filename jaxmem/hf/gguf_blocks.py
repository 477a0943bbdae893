"""The formats of weights in GGUF files, as ggml defines them: float32, float16, and blocks of quantized values.

The values of a block are along the last dimension of a matrix [out, in]; their scales are next to them, in float16.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

CHUNK = 1 << 22  # values that are quantized at a time


class Format(NamedTuple):
    """A format of tensors. `encode` maps blocks, float32 [n, block], to bytes [n, nbytes]."""

    type_number: int  # ggml_type
    file_type: int  # general.file_type of a file whose matrices have this format
    block: int
    nbytes: int
    encode: Callable[[np.ndarray], np.ndarray]


def encode(values: np.ndarray, kind: Format) -> bytes:
    """The bytes of a tensor, whose last dimension is a multiple of the block."""
    blocks = values.astype(np.float32, copy=False).reshape(-1, kind.block)
    step = max(1, CHUNK // kind.block)
    return b"".join(kind.encode(blocks[i : i + step]).tobytes() for i in range(0, len(blocks), step))


def _q8_0(x: np.ndarray) -> np.ndarray:
    """32 int8 codes and a scale, absmax / 127."""
    scale = np.abs(x).max(axis=1, keepdims=True) / 127
    codes = np.rint(x * _inverse(scale)).astype(np.int8)
    return np.concatenate([_half(scale), codes.view(np.uint8)], axis=1)


def _q4_0(x: np.ndarray) -> np.ndarray:
    """32 codes of 4 bits with zero at 8, and a scale that maps the value of largest magnitude to -8."""
    largest = np.take_along_axis(x, np.abs(x).argmax(axis=1)[:, None], axis=1)
    scale = largest / -8
    codes = np.clip(x * _inverse(scale) + 8.5, 0, 15).astype(np.uint8)
    return np.concatenate([_half(scale), codes[:, :16] | codes[:, 16:] << 4], axis=1)


def _q4_k(x: np.ndarray) -> np.ndarray:
    """8 groups of 32 codes of 4 bits; a value is scale * code - offset. The scales and offsets of the groups have 6
    bits, and are multiplied by two float16 factors of the block."""
    groups = x.reshape(-1, 8, 32)
    scale, offset = map(np.asarray, _fit(groups))
    step, least = (values.max(axis=1, keepdims=True) / 63 for values in (scale, offset))
    scales, offsets = (
        np.clip(np.rint(values * _inverse(unit)), 0, 63).astype(np.uint8)
        for values, unit in ((scale, step), (offset, least))
    )
    step, least = (unit.astype(np.float16).astype(np.float32) for unit in (step, least))
    codes = (groups + (least * offsets)[..., None]) * _inverse((step * scales)[..., None])
    codes = np.clip(np.rint(codes), 0, 15).astype(np.uint8)
    low = (
        np.concatenate([scales[:, :4], offsets[:, :4]], axis=1)
        | np.concatenate([scales[:, 4:] >> 4, offsets[:, 4:] >> 4], axis=1) << 6
    )
    high = scales[:, 4:] & 15 | offsets[:, 4:] << 4
    pairs = codes[:, 0::2] | codes[:, 1::2] << 4
    return np.concatenate([_half(step), _half(least), low, high, pairs.reshape(-1, 128)], axis=1)


@jax.jit
def _fit(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The scale and the offset, both at least 0, of each group [..., 32]. For the codes of each of 21 scales near (max
    - min) / 15, fits them by weighted least squares, and keeps the fit with the smallest error. Larger values have
    larger weights."""
    weight = jnp.abs(x) + jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True))
    least = jnp.minimum(x.min(axis=-1, keepdims=True), 0)
    span = x.max(axis=-1, keepdims=True) - least
    sum_of = partial(jnp.sum, axis=-1, keepdims=True)
    total, of_x = sum_of(weight), sum_of(weight * x)

    def divide(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.where(b == 0, 0, a / jnp.where(b == 0, 1, b))

    def try_one(best: Any, steps: jax.Array) -> tuple[Any, None]:
        codes = jnp.clip(jnp.rint((x - least) * divide(steps, span)), 0, 15)
        of_codes, of_squares, of_both = sum_of(weight * codes), sum_of(weight * codes**2), sum_of(weight * codes * x)
        offset = divide(of_codes * of_both - of_squares * of_x, total * of_squares - of_codes**2)
        offset = jnp.maximum(offset, 0)
        scale = divide(of_both + offset * of_codes, of_squares)
        new = scale, offset, sum_of(weight * (scale * codes - offset - x) ** 2)
        is_better = (new[2] < best[2]) & (scale > 0)
        return tuple(jnp.where(is_better, a, b) for a, b in zip(new, best, strict=True)), None

    begin = span / 15, -least, jnp.full_like(span, jnp.inf)
    (scale, offset, _), _ = jax.lax.scan(try_one, begin, jnp.linspace(14, 16, 21, dtype=x.dtype))
    return scale[..., 0], offset[..., 0]


def _inverse(x: np.ndarray) -> np.ndarray:
    """1 / x, and 0 for 0."""
    return np.divide(1, x, out=np.zeros_like(x), where=x != 0)


def _half(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float16).view(np.uint8)


FORMATS = {
    "float32": Format(0, 0, 1, 4, lambda x: x),
    "float16": Format(1, 1, 1, 2, lambda x: x.astype(np.float16)),
    "q8_0": Format(8, 7, 32, 34, _q8_0),
    "q4_0": Format(2, 2, 32, 18, _q4_0),
    "q4_k": Format(12, 14, 256, 144, _q4_k),
}
