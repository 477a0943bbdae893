"""A learned prompt: rows of embeddings that stand before every text, and nothing else learns (Lester et al.,
arXiv:2104.08691).

A prompt of P tokens is P x embed numbers, a few tens of thousands; every weight of the model stays. It takes the place
of P tokens: in activations, in the cache, in time. Gradients go back through all layers to the prompt, so that a step
keeps what LoRA's keeps; what it saves is state.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxmem.models import Decoder, parts
from jaxmem.models.exchange import rows
from jaxmem.sharding.storage import store_new

LEARNS = ("prompt.*",)


class Prompt(nnx.Module):
    """Tokens beyond the vocabulary: `vocab`, `vocab + 1`, ... stand for its rows."""

    def __init__(self, begin: Float[Array, "length embed"], vocab: int):
        self.weight = nnx.Param(store_new(begin, (None, "embed")), axes=(None, "embed"))
        self.length, self.vocab = begin.shape[0], vocab

    @property
    def tokens(self) -> Int[Array, "length"]:
        return jnp.arange(self.vocab, self.vocab + self.length, dtype=jnp.int32)

    def __call__(
        self, ids: Int[Array, "batch time"], x: Float[Array, "batch time embed"], dtype: DTypeLike
    ) -> Float[Array, "batch time embed"]:
        """`x`, of tokens of the vocabulary, with the prompt's own rows for its tokens."""
        own = jnp.clip(ids - self.vocab, 0, self.length - 1)
        return jnp.where((ids >= self.vocab)[..., None], parts.fetch(self.weight, dtype)[own], x)


def prompt(model: Decoder, *, length: int = 20, key: jax.Array | None = None) -> tuple[str, ...]:
    """Puts a prompt before what a decoder reads, which begins as the embeddings of random tokens. What learns is given
    back, as patterns."""
    ids = jax.random.randint(jax.random.key(0) if key is None else key, (length,), 0, model.cfg.vocab, jnp.int32)
    table = model.embedding.weight.get_value()
    model.prompt = Prompt(rows(table, ids, jnp.float32), model.cfg.vocab)
    return LEARNS
