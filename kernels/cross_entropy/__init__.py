"""Output projection, softmax and loss in one, without the logits. `reference.py` says what it computes.

A new implementation is a module with `losses` as in `reference.py`, and a line in IMPLEMENTATIONS.
"""

from __future__ import annotations

from typing import Any

import jax

from jaxmem.kernels.choice import Choice, choose

from . import pallas, reference, sliced
from .arguments import checked

IMPLEMENTATIONS: dict[str, Any] = {"pallas": pallas, "reference": reference, "sliced": sliced}


def cross_entropy(
    x: jax.Array,
    weight: jax.Array,
    labels: jax.Array,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    implementation: str | None = None,
) -> jax.Array:
    """-log softmax(x @ weight)[label] for each token, in float32: x is [..., embed], weight [embed, vocab].

    `label_smoothing` s gives every entry s / vocab of the probability (Szegedy et al., arXiv:1512.00567); `z_loss` adds
    its multiple of log(partition)^2 (Chowdhery et al., arXiv:2204.02311). x and weight have gradients.
    `implementation`: a name in IMPLEMENTATIONS; None picks one.
    """
    terms = checked(x, weight, labels, label_smoothing, z_loss)
    rows = x.reshape(-1, x.shape[-1])
    run = IMPLEMENTATIONS[picked(rows, weight, implementation).implementation]
    return run.losses(terms, rows, weight, labels.reshape(-1)).reshape(labels.shape)


def picked(x: jax.Array, weight: jax.Array, implementation: str | None = None) -> Choice:
    """Which implementation runs it, and why."""
    sizes = (x.shape[0], *weight.shape)
    names = IMPLEMENTATIONS
    return choose("cross_entropy", implementation, names, portable="sliced", kind=x.dtype.name, sizes=sizes)


__all__ = ["IMPLEMENTATIONS", "cross_entropy", "picked"]
