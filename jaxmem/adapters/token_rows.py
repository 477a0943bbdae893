"""Rows of the embedding, one for each of some tokens, trained while the other rows stay frozen.

PEFT calls these `trainable_token_indices`. n rows have n x embed parameters, and the frozen matrix may be quantized.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxmem.config.sections import EMBEDDING_ROWS
from jaxmem.errors import UserError
from jaxmem.models.decoder import Decoder
from jaxmem.models.embedding import RESIDUAL, take_rows
from jaxmem.models.layers import fetch
from jaxmem.sharding import constrain
from jaxmem.sharding.storage import store_new


class TokenRows(nnx.Module):
    """The adapter of an embedding: rows that replace the embedding's rows of the tokens `ids`."""

    scale = 1.0  # of merging

    def __init__(self, initial: Float[Array, "n embed"], ids: Sequence[int]):
        self.trained: nnx.Param = nnx.Param(store_new(initial, (None, "embed")), axes=(None, "embed"))
        self.ids = tuple(ids)

    @property
    def tokens(self) -> Int[Array, "n"]:
        return jnp.array(self.ids, jnp.int32)

    def rows(
        self, x: Float[Array, "batch time embed"], ids: Int[Array, "batch time"], _: Callable[[], jax.Array]
    ) -> Float[Array, "batch time embed"]:
        """The output of an embedding, from the rows `x` of its own weight."""
        same: Bool[Array, "batch time n"] = ids[..., None] == self.tokens
        own = fetch(self.trained, x.dtype)[jnp.argmax(same, axis=-1)]
        return constrain(jnp.where(same.any(axis=-1, keepdims=True), own, x), *RESIDUAL)


def tokens(model: Decoder, ids: Sequence[int]) -> tuple[str, ...]:
    """Makes the embedding's rows of some tokens trainable. Returns the patterns of the trainable weights."""
    if model.head is None:
        raise UserError("adapters.tokens does not support tied embeddings; use a decoder with a head")
    if model.embedding.lora is not None:
        raise UserError("adapters.tokens does not support an embedding with an adapter; adapt other layers")
    initial = take_rows(model.embedding.weight.get_value(), jnp.array(ids, jnp.int32), jnp.float32)
    model.embedding.lora = TokenRows(initial, ids)
    return (EMBEDDING_ROWS,)
