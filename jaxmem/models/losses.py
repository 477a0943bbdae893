"""Losses on arrays, each element for itself, in float32. What is summed over what is the objective's choice.

Cross entropy over V classes keeps 4V bytes a position for the backward pass beside the logits' own; the contrastive
loss compares B rows with B and so keeps 4B^2.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

_FAR = -1e9  # a score whose exponential is zero; finite, so that a row of nothing else has a loss


def cross_entropy(
    logits: Float[Array, "*batch classes"],
    labels: Int[Array, "*batch"],
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Float[Array, "*batch"]:
    """-log softmax(logits)[label], for the next token or for classes.

    `label_smoothing` s gives every class s / classes of the probability (Szegedy et al., arXiv:1512.00567);
    `z_loss` adds its multiple of log(partition)^2 (Chowdhery et al., arXiv:2204.02311, section 5). The label is
    picked by comparison, not by a gather, so that logits split over the vocabulary are reduced where they lie.
    """
    logits = logits.astype(jnp.float32)
    partition = jax.nn.logsumexp(logits, axis=-1)
    classes = logits.shape[-1]
    chosen = labels[..., None] == jnp.arange(classes, dtype=labels.dtype)
    loss = partition - jnp.sum(jnp.where(chosen, logits, 0.0), axis=-1)
    if label_smoothing:
        uniform = partition - jnp.mean(logits, axis=-1)
        loss = (1.0 - label_smoothing) * loss + label_smoothing * uniform
    if z_loss:
        loss = loss + z_loss * partition * partition
    return loss


def binary_cross_entropy(logits: Float[Array, "*batch"], labels: Float[Array, "*batch"]) -> Float[Array, "*batch"]:
    """-log of the probability of a label in {0, 1}; stable for logits of any size."""
    logits, labels = logits.astype(jnp.float32), labels.astype(jnp.float32)
    return labels * jax.nn.softplus(-logits) + (1.0 - labels) * jax.nn.softplus(logits)


def absolute_error(predicted: Float[Array, "*batch"], target: Float[Array, "*batch"]) -> Float[Array, "*batch"]:
    return jnp.abs(predicted.astype(jnp.float32) - target.astype(jnp.float32))


def squared_error(predicted: Float[Array, "*batch"], target: Float[Array, "*batch"]) -> Float[Array, "*batch"]:
    return jnp.square(predicted.astype(jnp.float32) - target.astype(jnp.float32))


def preference(margins: Float[Array, "*pairs"], label_smoothing: float = 0.0) -> Float[Array, "*pairs"]:
    """-log of the probability that of two answers the preferred one is the better, by how much more the model favours
    it than the reference does (Rafailov et al., arXiv:2305.18290, equation 7). `label_smoothing` is the share of pairs
    that are the wrong way round."""
    s, margins = label_smoothing, margins.astype(jnp.float32)
    return (1.0 - s) * jax.nn.softplus(-margins) + s * jax.nn.softplus(margins)


def similarities(
    left: Float[Array, "batch width"],
    right: Float[Array, "batch width"],
    mask: Float[Array, "batch"],
    temperature: float,
) -> Float[Array, "batch batch"]:
    """Cosines of all pairs over the temperature. Rows of `mask` 0, which fill up a batch, are nobody's neighbours."""

    def unit(x: Float[Array, "batch width"]) -> Float[Array, "batch width"]:
        x = x.astype(jnp.float32)
        return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-12)

    scores = unit(left) @ unit(right).T / temperature
    real = mask > 0
    return jnp.where(real[:, None] & real, scores, _FAR)


def contrastive(scores: Float[Array, "batch batch"]) -> Float[Array, "batch"]:
    """Each pair against the other pairs of the batch, in both directions (Radford et al., arXiv:2103.00020)."""
    labels = jnp.arange(scores.shape[0], dtype=jnp.int32)
    return 0.5 * (cross_entropy(scores, labels) + cross_entropy(scores.T, labels))
