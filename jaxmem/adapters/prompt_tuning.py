"""Prompt tuning: trained embeddings before every text; all other weights are frozen (Lester et al., arXiv:2104.08691).

A prompt of P tokens has P x embed parameters, a few tens of thousands. It needs the memory and time of P tokens in
activations and KV cache. Gradients pass through all layers, so a step saves the same activations as with LoRA.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxmem.config.sections import Adapter
from jaxmem.models.decoder import Decoder
from jaxmem.models.embedding import take_rows
from jaxmem.models.layers import fetch
from jaxmem.models.network import Network
from jaxmem.sharding.storage import store_new

TRAINABLE = ("prompt.*",)


class Prompt(nnx.Module):
    """Embeddings of the token ids `vocab`, `vocab + 1`, ..., beyond the vocabulary."""

    def __init__(self, initial: Float[Array, "length embed"], vocab: int):
        self.weight = nnx.Param(store_new(initial, (None, "embed")), axes=(None, "embed"))
        self.length, self.vocab = initial.shape[0], vocab

    @property
    def tokens(self) -> Int[Array, "length"]:
        return jnp.arange(self.vocab, self.vocab + self.length, dtype=jnp.int32)

    def __call__(
        self, ids: Int[Array, "batch time"], x: Float[Array, "batch time embed"], dtype: DTypeLike
    ) -> Float[Array, "batch time embed"]:
        """The embeddings `x` of all tokens, with those of the prompt at its tokens."""
        own = jnp.clip(ids - self.vocab, 0, self.length - 1)
        return jnp.where((ids >= self.vocab)[..., None], fetch(self.weight, dtype)[own], x)


def prompt(model: Decoder, *, length: int = 20, key: jax.Array | None = None) -> tuple[str, ...]:
    """Adds a prompt of `length` tokens to a decoder, initialized with the embeddings of random tokens. Returns the
    patterns of the trainable weights."""
    ids = jax.random.randint(jax.random.key(0) if key is None else key, (length,), 0, model.cfg.vocab, jnp.int32)
    embeddings = take_rows(model.embedding.weight.get_value(), ids, jnp.float32)
    model.prompt = Prompt(embeddings, model.cfg.vocab)
    return TRAINABLE


def attach_from_config(model: Network, cfg: Adapter, key: jax.Array, _: Sequence[int] | None) -> None:
    if isinstance(model, Decoder):
        prompt(model, length=cfg.virtual_tokens, key=key)
