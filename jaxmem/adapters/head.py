"""A new classifier on a backbone that stays: what a model sees in pictures serves for other questions (Donahue et al.,
arXiv:1310.1531).

What learns is embed x outputs numbers. Nothing is gone back through but the classifier itself: of the backbone the step
keeps no activation, and costs its forward pass, a third of what training it costs.
"""

from __future__ import annotations

import jax
from flax import nnx

from jaxmem.errors import UserError
from jaxmem.models import Decoder, Network, parts

LEARNS = ("head.*",)


def head(model: Network, *, outputs: int | None = None, key: jax.Array | None = None) -> tuple[str, ...]:
    """A new output layer for a model of pictures, of so many `outputs`, by default as many as it had. A decoder's stays
    as it was. What learns is given back, as patterns."""
    if isinstance(model, Decoder):
        if model.head is None:
            raise UserError("head: the embedding is the output projection too (tied); choose embedding.weight to learn")
        return LEARNS
    inputs, before = model.head.weight.get_value().shape
    rngs = nnx.Rngs(params=jax.random.key(0) if key is None else key)
    model.head = parts.Linear(rngs, inputs, outputs or before, ("embed", "classes"), bias=True)
    return LEARNS
