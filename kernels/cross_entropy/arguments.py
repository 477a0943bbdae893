"""What the loss takes: checked once, in one place, whichever implementation runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Terms:
    """What the loss has beside -log of the label's probability."""

    label_smoothing: float
    z_loss: float


class Statistics(NamedTuple):
    """All that the loss of a token, and its gradient, need to know of all logits."""

    partition: Float[Array, "tokens"]  # log of the sum of their exponentials
    chosen: Float[Array, "tokens"]  # the label's
    mean: Float[Array, "tokens"]

    def losses(self, terms: Terms) -> Float[Array, "tokens"]:
        s = terms.label_smoothing
        loss = self.partition - (1.0 - s) * self.chosen - s * self.mean
        return loss + terms.z_loss * self.partition * self.partition


def of_logits(
    logits: jax.Array,
    entry: jax.Array,
    label: jax.Array,
    partition: jax.Array,
    wanted: jax.Array,
    vocab: int,
    terms: Terms,
) -> jax.Array:
    """The gradient of logits from themselves; all broadcast to [tokens, entries]. `wanted`: that of each loss."""
    s = terms.label_smoothing
    aim = jnp.where(entry == label, 1.0 - s, 0.0) + s / vocab
    return wanted * ((1.0 + 2.0 * terms.z_loss * partition) * jnp.exp(logits - partition) - aim)


def checked(x: jax.Array, weight: jax.Array, labels: jax.Array, label_smoothing: float, z_loss: float) -> Terms:
    """The terms, or a ValueError that names the argument and what it should be."""
    _require(x.ndim >= 2 and x.size > 0, f"x has shape {x.shape}; it should be [..., embed], of no dimension empty")
    _require(x.dtype.name in DTYPES, f"x is {x.dtype}; it should be one of {', '.join(DTYPES)}")
    _require(weight.dtype == x.dtype, f"weight is {weight.dtype} and x {x.dtype}; they should be the same")
    fits = weight.ndim == 2 and weight.shape[0] == x.shape[-1] and weight.shape[1] > 0
    _require(fits, f"weight has shape {weight.shape}; it should be [{x.shape[-1]}, vocab]")
    _require(labels.shape == x.shape[:-1], f"labels has shape {labels.shape}; it should be {x.shape[:-1]}")
    _require(jnp.issubdtype(labels.dtype, jnp.integer), f"labels is {labels.dtype}; it should be of integers")
    _require(0.0 <= label_smoothing < 1.0, f"label_smoothing is {label_smoothing}; it should be in [0, 1)")
    _require(z_loss >= 0.0, f"z_loss is {z_loss}; it should not be negative")
    return Terms(float(label_smoothing), float(z_loss))


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(f"cross_entropy: {message}")
