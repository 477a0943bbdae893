"""Losses per element, in float32. The objective sums them.

`cross_entropy.py` has the cross entropy over a vocabulary, from features. The contrastive loss of B rows compares B x B
pairs and saves 4 B^2 bytes.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxmem.sharding.arrays import sum_parts

# A score whose exponential is zero; finite, so that the loss of a row with only masked scores is defined.
_MASKED = -1e9


@dataclass(frozen=True)
class Terms:
    """`label_smoothing` s adds s / classes to the target probability of every class (Szegedy et al., arXiv:1512.00567).
    `z_loss` is the coefficient of log(partition)^2 (Chowdhery et al., arXiv:2204.02311, section 5). `soft_cap`
    is applied to the logits first."""

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    soft_cap: float | None = None

    def loss(self, partition: jax.Array, label_logit: jax.Array, mean: Callable[[], jax.Array]) -> jax.Array:
        """The loss, from the log of the partition function, the logit of the label and the mean of all logits."""
        s = self.label_smoothing
        loss = partition - (1.0 - s) * label_logit - s * mean() if s else partition - label_logit
        return loss + self.z_loss * partition * partition if self.z_loss else loss


def cross_entropy(
    logits: Float[Array, "*batch classes"],
    labels: Int[Array, "*batch"],
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    over: tuple[str, ...] = (),
) -> Float[Array, "*batch"]:
    """-log softmax(logits)[label] per element, in float32; saves 4 bytes per logit for the backward pass. The label is
    picked by comparison, not by a gather, so that logits sharded over the classes are reduced in place.

    Args:
        logits: [..., classes].
        labels: [...].
        label_smoothing: The share of the target that is divided evenly over all classes.
        z_loss: The factor of log(sum(exp(logits)))^2, which is added.
        over: Mesh axes of a `jax.shard_map` along which devices have the logits of other classes, and labels counted
            from their first class.
    """
    logits = logits.astype(jnp.float32)
    partition = jax.nn.logsumexp(logits, axis=-1)
    is_label = labels[..., None] == jnp.arange(logits.shape[-1], dtype=labels.dtype)
    label_logit = jnp.sum(jnp.where(is_label, logits, 0.0), axis=-1)
    mean = lambda: sum_parts(jnp.mean(logits, axis=-1), over) / axis_size(over)  # noqa: E731
    if over:
        top = jax.lax.pmax(jax.lax.stop_gradient(partition), over)
        partition = top + jnp.log(sum_parts(jnp.exp(partition - top), over))
    return Terms(label_smoothing, z_loss).loss(partition, sum_parts(label_logit, over), mean)


def axis_size(over: tuple[str, ...]) -> int:
    """The number of devices along mesh axes of a `jax.shard_map`; 1 outside."""
    return jax.lax.axis_size(over) if over else 1


def preference(margins: Float[Array, "*pairs"], label_smoothing: float = 0.0) -> Float[Array, "*pairs"]:
    """DPO: -log of the probability that the preferred answer of a pair is better, from the difference between the log
    probability ratios of the model and of the reference model (Rafailov et al., arXiv:2305.18290, equation 7).
    `label_smoothing` is the assumed share of pairs with swapped labels."""
    s = label_smoothing
    margins = margins.astype(jnp.float32)
    return (1.0 - s) * jax.nn.softplus(-margins) + s * jax.nn.softplus(margins)


def similarities(
    left: Float[Array, "batch width"],
    right: Float[Array, "batch width"],
    mask: Float[Array, "batch"],
    temperature: float | Float[Array, ""],
) -> Float[Array, "batch batch"]:
    """Cosine similarities of all rows of `left` and `right` / temperature. Padding rows (`mask` 0) are no negatives:
    their entries are one large negative number, the same in all of them. Multiplying it afterwards makes NaN, since a
    fused multiply-add in a softmax differs from the rounded maximum by more than exp allows."""

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
