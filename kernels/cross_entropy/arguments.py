"""What the loss takes: checked once, in one place, whichever implementation runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmem.kernels.given import FLOATS, Given


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


def checked(
    x: Any, weight: Any, labels: Any, label_smoothing: Any, z_loss: Any
) -> tuple[jax.Array, jax.Array, jax.Array, Terms]:
    """The arguments in one form, or a ValueError that names the argument and what it should be."""
    given = Given("cross_entropy")
    x = given.array("x", x, "[..., tokens, embed]", FLOATS)
    weight = given.array("weight", weight)
    given.require(weight.dtype == x.dtype, f"weight is {weight.dtype} and x {x.dtype}; they should be the same")
    fits = weight.ndim == 2 and weight.shape[0] == x.shape[-1] and weight.shape[1] > 0
    given.require(fits, f"weight has shape {weight.shape}; it should be [{x.shape[-1]}, vocab]")
    labels = given.integers("labels", labels, x.shape[:-1])
    if labels.dtype.itemsize < 4:  # 8 bits hold no vocabulary to compare with
        labels = labels.astype(jnp.int32)
    smoothing, z_loss = given.number("label_smoothing", label_smoothing), given.number("z_loss", z_loss)
    given.require(0.0 <= smoothing < 1.0, f"label_smoothing is {smoothing}; it should be in [0, 1)")
    given.require(z_loss >= 0.0, f"z_loss is {z_loss}; it should not be negative")
    return x, weight, labels, Terms(smoothing, z_loss)
