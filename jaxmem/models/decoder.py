"""Decoder-only language models: Llama 2/3, Mistral, Qwen 2.5/3."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxmem import config
from jaxmem.models import cache as caches
from jaxmem.models import parts
from jaxmem.models.block import Attention, Block, GatedMlp
from jaxmem.models.cache import Cache, Place
from jaxmem.models.exchange import places
from jaxmem.models.parts import Execution
from jaxmem.models.rope import Angles, angles
from jaxmem.sharding import constrain, current
from jaxmem.stack import apply_stack, stacked


class Decoder(nnx.Module):
    def __init__(self, cfg: config.Decoder, rngs: nnx.Rngs, execution: Execution = Execution()):
        self.cfg, self.execution = cfg, execution
        self.embedding = parts.Embedding(rngs, cfg.vocab, cfg.embed)
        self.blocks = stacked(self._block, cfg.layers, rngs)
        self.norm = parts.RMSNorm(cfg.embed, cfg.norm_epsilon)
        self.head = None if cfg.tie_embeddings else parts.Linear(rngs, cfg.embed, cfg.vocab, ("embed", "vocab"))
        self.prompt: Any = nnx.data(None)  # what is learned before the tokens: jaxmem.adapters

    def _block(self, rngs: nnx.Rngs) -> Block:
        cfg = self.cfg
        attention = Attention(
            rngs,
            cfg.embed,
            cfg.heads,
            cfg.kv_heads,
            cfg.head_dim,
            causal=True,
            window=cfg.window,
            bias=cfg.attention_bias,
            output_bias=cfg.output_bias,
            qk_norm=cfg.norm_epsilon if cfg.qk_norm else None,
            implementation=self.execution.attention,
            deterministic=self.execution.deterministic,
        )
        norms = parts.RMSNorm(cfg.embed, cfg.norm_epsilon), parts.RMSNorm(cfg.embed, cfg.norm_epsilon)
        mlp = GatedMlp(rngs, cfg.embed, cfg.mlp, bias=cfg.mlp_bias)
        return Block(attention, mlp, norms, cfg.dropout, self.execution.long)

    def __call__(
        self,
        tokens: Int[Array, "batch time"],
        positions: Int[Array, "batch time"] | None = None,
        segment_ids: Int[Array, "batch time"] | None = None,
        keys: parts.RowKeys | None = None,
    ) -> Float[Array, "batch time vocab"]:
        """Logits of the token that follows each position. `keys` turn dropout on."""
        return self.logits(self.features(tokens, positions, segment_ids, keys))

    def features(
        self,
        tokens: Int[Array, "batch time"],
        positions: Int[Array, "batch time"] | None = None,
        segment_ids: Int[Array, "batch time"] | None = None,
        keys: parts.RowKeys | None = None,
    ) -> Float[Array, "batch time embed"]:
        """What the output projection sees: losses that never hold all logits start here."""
        if self.prompt is not None:
            tokens, positions, segment_ids = self._behind_prompt(tokens, positions, segment_ids)
        x, _ = apply_stack(
            self.blocks,
            lambda block, x, keys, beside: (block(x, *beside, keys)[0], None),
            self._embed(tokens),
            parts.layer_keys(keys, self.cfg.layers),
            (self._angles(tokens, positions), segment_ids),
            options=self.execution.stack,
        )
        return self.norm(x if self.prompt is None else x[:, self.prompt.length :])

    def _behind_prompt(
        self, tokens: jax.Array, positions: jax.Array | None, segment_ids: jax.Array | None
    ) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
        """A row's tokens with those of the prompt in front, which belong to its first text."""
        rows, more = tokens.shape[0], self.prompt.length

        def behind(own: jax.Array, x: jax.Array) -> jax.Array:
            return jnp.concatenate([jnp.broadcast_to(own, (rows, more)), x], axis=1)

        places = None if positions is None else behind(jnp.arange(more, dtype=jnp.int32), positions + more)
        texts = None if segment_ids is None else behind(segment_ids[:, :1], segment_ids)
        return behind(self.prompt.tokens, tokens), places, texts

    def logits(self, x: Float[Array, "batch time embed"]) -> Float[Array, "batch time vocab"]:
        x = constrain(x, "batch", "vocab_time", "embed")
        y = self.embedding.project(x) if self.head is None else self.head(x)
        # Of a vocabulary that the devices do not divide, what was added is cut off: no loss and no token sees it.
        return constrain(y, "batch", "vocab_time", "vocab")[..., : self.cfg.vocab]

    @property
    def projection(self) -> nnx.Param | None:
        """The weight that alone makes logits of features; None where an adapter has a part in it."""
        if self.head is None:
            return self.embedding.weight
        return self.head.weight if self.head.lora is None else None

    def empty(self, rows: int, room: int, kept: str = "full") -> Cache:
        """Nothing read yet, of so many texts, with room for so many tokens."""
        return caches.empty(self.cfg, rows, room, self.execution.dtype, kept)

    def extend(
        self,
        tokens: Int[Array, "batch time"],
        cache: Cache,
        length: Int[Array, ""],
        first: Int[Array, "batch"] | None = None,
        last: Int[Array, ""] | None = None,
    ) -> tuple[Float[Array, "batch vocab"], Cache]:
        """Logits after more tokens, from place `length` of the cache on, and the cache with them, written in place.

        `first`: where each row begins; what stands before is padding, which makes texts end together. `last`: the one
        of these tokens whose logits are given, by default the last; those after it are padding, to be overwritten.
        """
        spots = length + jnp.arange(tokens.shape[1], dtype=jnp.int32)
        positions = jnp.broadcast_to(spots, tokens.shape)
        # Padding in front stands before every beginning: any position will do.
        turned = self._angles(tokens, positions if first is None else jnp.maximum(positions - first[:, None], 0))

        def layer(block: Block, carried: tuple[jax.Array, Cache], i: jax.Array, _: None) -> tuple[Any, None]:
            x, cache = carried
            return block(x, turned, cache=Place(cache, i, length, first)), None

        layers = jnp.arange(self.cfg.layers, dtype=jnp.int32)
        # Nothing goes back through this, so that nothing need be made again.
        way = dataclasses.replace(self.execution.stack, remat="none")
        (x, cache), _ = apply_stack(self.blocks, layer, (self._embed(tokens), cache), layers, options=way)
        x = x[:, -1:] if last is None else jax.lax.dynamic_slice_in_dim(x, last, 1, axis=1)
        return self.logits(self.norm(x))[:, 0], cache

    def _embed(self, tokens: Int[Array, "batch time"]) -> Float[Array, "batch time embed"]:
        dtype = self.execution.dtype
        if self.prompt is None:
            return self.embedding(tokens, dtype)
        known = jnp.minimum(tokens, self.cfg.vocab - 1)
        return constrain(self.prompt(tokens, self.embedding(known, dtype), dtype), "batch", "stream", "embed")

    def _angles(self, tokens: jax.Array, positions: jax.Array | None) -> Angles:
        if positions is None:
            order = places(current(), tokens.shape[1], self.cfg.window)
            row = jnp.arange(tokens.shape[1], dtype=jnp.int32) if order is None else jnp.asarray(order)
            positions = jnp.broadcast_to(row, tokens.shape)
        return angles(positions, self.cfg.rope, self.cfg.head_dim)
