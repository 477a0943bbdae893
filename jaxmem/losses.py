"""Losses on arrays, each element for itself, in float32. What is summed over what is the objective's choice."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


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
    return jnp.maximum(logits, 0.0) - logits * labels + jnp.log1p(jnp.exp(-jnp.abs(logits)))


def absolute_error(predicted: Float[Array, "*batch"], target: Float[Array, "*batch"]) -> Float[Array, "*batch"]:
    return jnp.abs(predicted.astype(jnp.float32) - target.astype(jnp.float32))


def squared_error(predicted: Float[Array, "*batch"], target: Float[Array, "*batch"]) -> Float[Array, "*batch"]:
    return jnp.square(predicted.astype(jnp.float32) - target.astype(jnp.float32))


def similarities(
    left: Float[Array, "batch width"], right: Float[Array, "batch width"], temperature: float
) -> Float[Array, "batch batch"]:
    """Cosines of all pairs over the temperature."""

    def unit(x: jax.Array) -> jax.Array:
        x = x.astype(jnp.float32)
        return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-12)

    return unit(left) @ unit(right).T / temperature


def contrastive(scores: Float[Array, "batch batch"]) -> Float[Array, "batch"]:
    """Each pair against the other pairs of the batch, in both directions (Radford et al., arXiv:2103.00020)."""
    labels = jnp.arange(scores.shape[0], dtype=jnp.int32)
    return 0.5 * (cross_entropy(scores, labels) + cross_entropy(scores.T, labels))
