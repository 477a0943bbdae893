"""Output projection, softmax and loss in one, without the logits. `reference.py` says what it computes.

A new implementation is a module with `losses` as in `reference.py`, and a line in IMPLEMENTATIONS.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxmem.kernels import choice

from . import pallas, reference, sliced
from .arguments import checked

IMPLEMENTATIONS: dict[str, Any] = {"pallas": pallas, "reference": reference, "sliced": sliced}


def cross_entropy(
    x: ArrayLike,
    weight: ArrayLike,
    labels: ArrayLike,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    implementation: str | None = None,
) -> jax.Array:
    """-log softmax(x @ weight)[label] for each token, in float32: x is [..., embed], weight [embed, vocab].

    `label_smoothing` s gives every entry s / vocab of the probability (Szegedy et al., arXiv:1512.00567); `z_loss` adds
    its multiple of log(partition)^2 (Chowdhery et al., arXiv:2204.02311). x and weight have gradients. A label that is
    none of the vocabulary gives a loss of NaN and adds nothing to the gradients, so that `jnp.where` leaves it out.
    `implementation`: a name in IMPLEMENTATIONS; None picks one.
    """
    x, weight, labels, terms = checked(x, weight, labels, label_smoothing, z_loss)
    there = (labels >= 0) & (labels < weight.shape[1])
    own = jnp.where(there, labels, jnp.zeros((), labels.dtype)).astype(jnp.int32)
    losses = choice.run(
        "cross_entropy",
        implementation,
        IMPLEMENTATIONS,
        lambda way: way.losses(terms, x.reshape(-1, x.shape[-1]), weight, own.reshape(-1)),
        (x, weight, labels),
        portable="sliced",
        kind=x.dtype.name,
        sizes=(labels.size, *weight.shape),
    )
    return jnp.where(there, losses.reshape(labels.shape), jnp.float32(jnp.nan))


__all__ = ["IMPLEMENTATIONS", "cross_entropy"]
