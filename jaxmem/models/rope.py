"""Rotary position embeddings (Su et al., arXiv:2104.09864) and four ways to extend them to longer contexts.

`linear` divides every frequency; `llama3` divides low frequencies, and interpolates between two wavelengths; `yarn`
(Peng et al., arXiv:2309.00071) interpolates between two numbers of rotations, and sharpens the softmax; `longrope`
(Ding et al., arXiv:2402.13753) divides each frequency by a factor of its own, with other factors for documents that
are longer than the original length.
"""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxmem.config.networks import Rope


class Angles(NamedTuple):
    """Cosine and sine of the angles of each position, in float32. All layers share them."""

    cos: Float[Array, "batch time half"]
    sin: Float[Array, "batch time half"]


def frequencies(rope: Rope, head_dim: int, *, is_long: bool = False) -> tuple[np.ndarray, float]:
    """Radians per position for each pair of the dimensions that are rotated, and a factor on cosine and sine.
    `is_long`: for sequences longer than the original length (longrope)."""
    size = rotated(rope, head_dim)
    base = rope.theta ** (-np.arange(0, size, 2, dtype=np.float64) / size)
    stretched = base / rope.factor
    if rope.scaling == "none":
        return base, 1.0
    if rope.scaling == "longrope":
        sharpen = math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_length)) if rope.factor > 1 else 1.0
        factors = rope.long_factors if is_long else rope.short_factors
        return base / np.asarray(factors), rope.attention_factor or sharpen
    if rope.scaling == "linear":
        return stretched, 1.0
    turns = rope.original_length * base / (2 * math.pi)  # full rotations within the original length
    if rope.scaling == "llama3":
        keep = (turns - rope.low_frequency) / (rope.high_frequency - rope.low_frequency)
        keep = np.clip(keep, 0.0, 1.0)
        return keep * base + (1 - keep) * stretched, 1.0

    def pair(rotations: float) -> float:
        """The (fractional) index of the pair of dimensions with this number of rotations within the original length."""
        return size * math.log(rope.original_length / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = pair(rope.beta_fast)
    high = pair(rope.beta_slow)
    if rope.truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, size - 1)
    stretch = np.clip((np.arange(size // 2) - low) / max(high - low, 1e-3), 0.0, 1.0)
    sharpen = rope.magnitude(1.0)
    if rope.mscale is not None and rope.mscale_all_dim is not None:
        sharpen = rope.magnitude(rope.mscale) / rope.magnitude(rope.mscale_all_dim)
    sharpen = rope.attention_factor or sharpen
    return stretch * stretched + (1 - stretch) * base, sharpen


def rotated(rope: Rope, head_dim: int) -> int:
    """The number of dimensions of a head that are rotated."""
    return int(head_dim * rope.share)


def document_lengths(
    positions: Int[Array, "batch time"], segment_ids: Int[Array, "batch time"] | None
) -> Int[Array, "batch #time"]:
    """The number of tokens of each token's document; without segment ids, a row is one document."""
    if segment_ids is None:
        return jnp.max(positions, axis=1, keepdims=True) + 1
    longest = partial(jax.ops.segment_max, num_segments=positions.shape[1] + 1)  # a row has at most one per token
    return jnp.take_along_axis(jax.vmap(longest)(positions, segment_ids), segment_ids, axis=1) + 1


def angles(
    positions: Int[Array, "batch time"], rope: Rope, head_dim: int, lengths: Int[Array, "batch #time"] | None = None
) -> Angles:
    """`lengths`: the number of tokens of each token's document, which chooses the factors of longrope; None: a row is
    one document."""
    radians, factor = frequencies(rope, head_dim)
    steps = jnp.asarray(radians, jnp.float32)
    if rope.scaling == "longrope":
        lengths = document_lengths(positions, None) if lengths is None else lengths
        long = jnp.asarray(frequencies(rope, head_dim, is_long=True)[0], jnp.float32)
        steps = jnp.where(lengths[..., None] > rope.original_length, long, steps)
    phase = positions[..., None].astype(jnp.float32) * steps
    return Angles(jnp.cos(phase) * factor, jnp.sin(phase) * factor)


def select(which: jax.Array, angles: Angles, other: Angles) -> Angles:
    """`angles` where `which` is true, otherwise `other`."""
    return Angles(*(jnp.where(which, x, y) for x, y in zip(angles, other, strict=True)))


def rotate(x: Float[Array, "batch time heads head_dim"], angles: Angles) -> Float[Array, "batch time heads head_dim"]:
    """x with dimensions i and i + r / 2 of the first r dimensions rotated, in float32."""
    cos = angles.cos[:, :, None, :]
    sin = angles.sin[:, :, None, :]
    half = cos.shape[-1]
    a, b, *others = jnp.split(x, [half, 2 * half][: 1 if 2 * half == x.shape[-1] else 2], axis=-1)
    a = a.astype(jnp.float32)
    b = b.astype(jnp.float32)
    turned = [(a * cos - b * sin).astype(x.dtype), (b * cos + a * sin).astype(x.dtype)]
    return jnp.concatenate([*turned, *others], axis=-1)
