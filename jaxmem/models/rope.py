"""Rotary position embeddings (Su et al., arXiv:2104.09864) and three ways to extend them to longer contexts.

`linear` divides every frequency; `llama3` divides low frequencies, and interpolates between two wavelengths; `yarn`
(Peng et al., arXiv:2309.00071) interpolates between two numbers of rotations, and sharpens the softmax.
"""

import math
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


def frequencies(rope: Rope, head_dim: int) -> tuple[np.ndarray, float]:
    """Radians per position for each pair of dimensions, and a factor on cosine and sine."""
    base = rope.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    stretched = base / rope.factor
    if rope.scaling == "none":
        return base, 1.0
    if rope.scaling == "linear":
        return stretched, 1.0
    turns = rope.original_length * base / (2 * math.pi)  # full rotations within the original length
    if rope.scaling == "llama3":
        keep = (turns - rope.low_frequency) / (rope.high_frequency - rope.low_frequency)
        keep = np.clip(keep, 0.0, 1.0)
        return keep * base + (1 - keep) * stretched, 1.0

    def pair(rotations: float) -> float:
        """The (fractional) index of the pair of dimensions with this number of rotations within the original length."""
        return head_dim * math.log(rope.original_length / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = max(math.floor(pair(rope.beta_fast)), 0), min(math.ceil(pair(rope.beta_slow)), head_dim - 1)
    stretch = np.clip((np.arange(head_dim // 2) - low) / max(high - low, 1e-3), 0.0, 1.0)
    sharpen = rope.attention_factor or (0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0)
    return stretch * stretched + (1 - stretch) * base, sharpen


def angles(positions: Int[Array, "batch time"], rope: Rope, head_dim: int) -> Angles:
    radians, factor = frequencies(rope, head_dim)
    phase = positions[..., None].astype(jnp.float32) * jnp.asarray(radians, jnp.float32)
    return Angles(jnp.cos(phase) * factor, jnp.sin(phase) * factor)


def select(which: jax.Array, angles: Angles, other: Angles) -> Angles:
    """`angles` where `which` is true, otherwise `other`."""
    return Angles(*(jnp.where(which, x, y) for x, y in zip(angles, other, strict=True)))


def rotate(x: Float[Array, "batch time heads head_dim"], angles: Angles) -> Float[Array, "batch time heads head_dim"]:
    """x with dimensions i and i + head_dim / 2 rotated, in float32."""
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = angles.cos[:, :, None, :], angles.sin[:, :, None, :]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
