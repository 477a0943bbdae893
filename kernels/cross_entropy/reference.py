"""The loss as its definition reads, all logits at once: the contract. JAX differentiates it by itself.

With T tokens and a vocabulary of V it holds 4 T V bytes of logits, and as many of their gradient.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .arguments import Statistics, Terms


def losses(
    terms: Terms, x: Float[Array, "tokens embed"], weight: Float[Array, "embed vocab"], labels: Int[Array, "tokens"]
) -> Float[Array, "tokens"]:
    logits = jnp.matmul(x, weight, preferred_element_type=jnp.float32)
    chosen = jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
    return Statistics(jax.nn.logsumexp(logits, axis=-1), chosen, jnp.mean(logits, axis=-1)).losses(terms)
