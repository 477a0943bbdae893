"""Losses per element, in float32. The objective sums them.

Cross entropy is in `cross_entropy.py`. The contrastive loss of B rows compares B x B pairs and saves 4 B^2 bytes.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmem.models.cross_entropy import cross_entropy

# A score whose exponential is zero; finite, so that the loss of a row with only masked scores is defined.
_MASKED = -1e9


def preference(margins: Float[Array, "*pairs"], label_smoothing: float = 0.0) -> Float[Array, "*pairs"]:
    """DPO: -log of the probability that the preferred answer of a pair is better, from the difference between the log
    probability ratios of the model and of the reference model (Rafailov et al., arXiv:2305.18290, equation 7).
    `label_smoothing` is the assumed share of pairs with swapped labels."""
    s, margins = label_smoothing, margins.astype(jnp.float32)
    return (1.0 - s) * jax.nn.softplus(-margins) + s * jax.nn.softplus(margins)


def similarities(
    left: Float[Array, "batch width"],
    right: Float[Array, "batch width"],
    mask: Float[Array, "batch"],
    temperature: float,
) -> Float[Array, "batch batch"]:
    """Cosine similarities of all rows of `left` and `right` / temperature. Padding rows (`mask` 0) are no negatives."""

    def unit(x: Float[Array, "batch width"]) -> Float[Array, "batch width"]:
        x = x.astype(jnp.float32)
        return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-12)

    scores = unit(left) @ unit(right).T / temperature
    real = mask > 0
    return jnp.where(real[:, None] & real, scores, _MASKED)


def contrastive(scores: Float[Array, "batch batch"]) -> Float[Array, "batch"]:
    """Cross entropy of each pair against the other pairs of the batch, in both directions (CLIP: Radford et al.,
    arXiv:2103.00020)."""
    labels = jnp.arange(scores.shape[0], dtype=jnp.int32)
    return 0.5 * (cross_entropy(scores, labels) + cross_entropy(scores.T, labels))
