"""Decoder-only language models: Llama 2/3, Mistral, Qwen 2.5/3."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxmem.config import networks
from jaxmem.models.attention import Attention, AttentionSpec, Tokens, context_order
from jaxmem.models.block import Block, GatedMlp
from jaxmem.models.embedding import Embedding
from jaxmem.models.kv_cache import CacheSlot, KVCache, empty_cache
from jaxmem.models.layers import Features, Ids, RMSNorm, RowKeys
from jaxmem.models.linear import Linear
from jaxmem.models.network import Execution, Network, apply_blocks
from jaxmem.models.rope import Angles, angles
from jaxmem.sharding import constrain, current
from jaxmem.stack import apply_stack, stacked


class Decoder(Network):
    """A pre-norm transformer with causal attention, gated MLPs and rotary positions."""

    def __init__(self, cfg: networks.Decoder, rngs: nnx.Rngs, execution: Execution = Execution()):
        self.cfg, self.execution = cfg, execution
        self.embedding = Embedding(rngs, cfg.vocab, cfg.embed)
        self.blocks = stacked(self._block, cfg.layers, rngs)
        self.norm = RMSNorm(cfg.embed, cfg.norm_epsilon)
        self.head = None if cfg.tie_embeddings else Linear(rngs, cfg.embed, cfg.vocab, ("embed", "vocab"))
        self.prompt: Any = nnx.data(None)  # trained embeddings before the tokens: jaxmem.adapters

    def _block(self, rngs: nnx.Rngs) -> Block:
        cfg = self.cfg
        biases = {"bias": cfg.attention_bias, "output_bias": cfg.output_bias}
        qk_norm = cfg.norm_epsilon if cfg.qk_norm else None
        sizes = cfg.embed, cfg.heads, cfg.kv_heads, cfg.head_dim
        spec = AttentionSpec(*sizes, causal=True, window=cfg.window, **biases, qk_norm=qk_norm)
        attention = Attention(rngs, spec, self.execution)
        norms = RMSNorm(cfg.embed, cfg.norm_epsilon), RMSNorm(cfg.embed, cfg.norm_epsilon)
        return Block(attention, GatedMlp(rngs, cfg.embed, cfg.mlp, bias=cfg.mlp_bias), norms, cfg.dropout)

    def __call__(
        self, tokens: Ids, positions: Ids | None = None, segment_ids: Ids | None = None, keys: RowKeys | None = None
    ) -> Float[Array, "batch time vocab"]:
        """Logits of the token after each position. `keys` enables dropout."""
        return self.logits(self.features(tokens, positions, segment_ids, keys))

    def features(
        self, tokens: Ids, positions: Ids | None = None, segment_ids: Ids | None = None, keys: RowKeys | None = None
    ) -> Features:
        """The input of the output projection, for losses in slices of the vocabulary."""
        if self.prompt is not None:
            tokens, positions, segment_ids = self._after_prompt(tokens, positions, segment_ids)
        apply = lambda block, x, keys, tokens: block(x, tokens, keys)[0]  # noqa: E731
        x, others = self._embed(tokens), Tokens(self._angles(tokens, positions), segment_ids)
        x = apply_blocks(self.blocks, x, keys, self.cfg.layers, self.execution.stack, apply, others)
        return self.norm(x if self.prompt is None else x[:, self.prompt.length :])

    def _after_prompt(
        self, tokens: jax.Array, positions: jax.Array | None, segment_ids: jax.Array | None
    ) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
        """Prepends the tokens of the prompt to each row. They belong to the first document of the row."""
        rows, length = tokens.shape[0], self.prompt.length

        def prepend(own: jax.Array, x: jax.Array) -> jax.Array:
            return jnp.concatenate([jnp.broadcast_to(own, (rows, length)), x], axis=1)

        if positions is not None:
            positions = prepend(jnp.arange(length, dtype=jnp.int32), positions + length)
        segment_ids = None if segment_ids is None else prepend(segment_ids[:, :1], segment_ids)
        return prepend(self.prompt.tokens, tokens), positions, segment_ids

    def logits(self, x: Features) -> Float[Array, "batch time vocab"]:
        x = constrain(x, "batch", "vocab_time", "embed")
        y = self.embedding.project(x) if self.head is None else self.head(x)
        # Removes the padding of a vocabulary whose size is not divisible by the number of devices.
        return constrain(y, "batch", "vocab_time", "vocab")[..., : self.cfg.vocab]

    @property
    def projection(self) -> nnx.Param | None:
        """The weight of the output projection; None where an adapter contributes to the logits."""
        if self.head is None:
            return self.embedding.weight
        return self.head.weight if self.head.lora is None else None

    def empty_cache(self, rows: int, capacity: int, storage: str = "full") -> KVCache:
        """A KV cache for `rows` texts of up to `capacity` tokens, stored in full precision or in int8."""
        return empty_cache(self.cfg, rows, capacity, self.execution.dtype, storage)

    def extend(
        self,
        tokens: Ids,
        cache: KVCache,
        length: Int[Array, ""],
        first: Int[Array, "batch"] | None = None,
        last: Int[Array, ""] | None = None,
    ) -> tuple[Float[Array, "batch vocab"], KVCache]:
        """Returns the logits after `tokens` and the cache, to which they are written in place, starting at `length`.

        `first` is the first token of each row that is not padding: texts are padded on the left. `last` is the token
        whose logits are returned, by default the last one; tokens after it are padding and will be overwritten.
        """
        positions = jnp.broadcast_to(length + jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        # Padding is before the first token, so its position does not matter.
        turned = self._angles(tokens, positions if first is None else jnp.maximum(positions - first[:, None], 0))

        def layer(block: Block, carry: tuple[jax.Array, KVCache], i: jax.Array, _: None) -> tuple[Any, None]:
            x, cache = carry
            return block(x, Tokens(turned), slot=CacheSlot(cache, i, length, first)), None

        layers = jnp.arange(self.cfg.layers, dtype=jnp.int32)
        # There is no backward pass, so nothing to recompute.
        options = dataclasses.replace(self.execution.stack, remat="none")
        (x, cache), _ = apply_stack(self.blocks, layer, (self._embed(tokens), cache), layers, options=options)
        x = x[:, -1:] if last is None else jax.lax.dynamic_slice_in_dim(x, last, 1, axis=1)
        return self.logits(self.norm(x))[:, 0], cache

    def _embed(self, tokens: Ids) -> Features:
        dtype = self.execution.dtype
        if self.prompt is None:
            return self.embedding(tokens, dtype)
        known = jnp.minimum(tokens, self.cfg.vocab - 1)
        return constrain(self.prompt(tokens, self.embedding(known, dtype), dtype), "batch", "stream", "embed")

    def _angles(self, tokens: Ids, positions: Ids | None) -> Angles:
        if positions is None:
            order = context_order(current(), tokens.shape[1], self.execution.context_method, self.cfg.window)
            row = jnp.arange(tokens.shape[1], dtype=jnp.int32) if order is None else jnp.asarray(order)
            positions = jnp.broadcast_to(row, tokens.shape)
        return angles(positions, self.cfg.rope, self.cfg.head_dim)
