"""Vision transformer (Dosovitskiy et al., arXiv:2010.11929): patches become tokens.

With patches of p pixels a side an image of s has (s/p)^2 tokens; a layer costs what a decoder's does on so many, but
for the causal mask: every patch sees every other.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxmem import config
from jaxmem.models import parts
from jaxmem.models.block import Attention, Block, DenseMlp
from jaxmem.models.parts import Execution
from jaxmem.sharding import constrain
from jaxmem.stack import apply_stack, stacked


class Vit(nnx.Module):
    def __init__(self, cfg: config.Vit, rngs: nnx.Rngs, execution: Execution = Execution()):
        self.cfg, self.execution = cfg, execution
        patches = (cfg.image_size // cfg.patch) ** 2
        self.patches = parts.Linear(rngs, cfg.patch**2 * cfg.channels, cfg.embed, ("patch", "embed"), bias=True)
        # As large as what the pixels bring, so that places are told apart from the first update on.
        self.position = parts.weight(rngs, (patches, cfg.embed), ("patch", "embed"), scale=1.0)
        self.blocks = stacked(self._block, cfg.layers, rngs)
        self.norm = parts.LayerNorm(cfg.embed)
        self.head = parts.Linear(rngs, cfg.embed, cfg.outputs, ("embed", "classes"), bias=True)

    def _block(self, rngs: nnx.Rngs) -> Block:
        cfg = self.cfg
        attention = Attention(
            rngs,
            cfg.embed,
            cfg.heads,
            cfg.heads,
            cfg.embed // cfg.heads,
            causal=False,
            bias=True,
            implementation=self.execution.attention,
            deterministic=self.execution.deterministic,
        )
        norms = parts.LayerNorm(cfg.embed), parts.LayerNorm(cfg.embed)
        return Block(attention, DenseMlp(rngs, cfg.embed, cfg.mlp), norms, cfg.dropout, self.execution.long)

    def __call__(
        self, images: Float[Array, "batch height width channels"], keys: parts.RowKeys | None = None
    ) -> Float[Array, "batch outputs"]:
        return self.logits(self.features(images, keys))

    def features(
        self, images: Float[Array, "batch height width channels"], keys: parts.RowKeys | None = None
    ) -> Float[Array, "batch embed"]:
        x = self.patches(self._cut(images).astype(self.execution.dtype))
        x = constrain(x + parts.fetch(self.position, x.dtype), "batch", "time", "embed")
        x, _ = apply_stack(
            self.blocks,
            lambda block, x, keys, _: (block(x, keys=keys)[0], None),
            x,
            parts.layer_keys(keys, self.cfg.layers),
            options=self.execution.stack,
        )
        return jnp.mean(self.norm(x), axis=1)

    def logits(self, x: Float[Array, "batch embed"]) -> Float[Array, "batch outputs"]:
        return self.head(x)

    def _cut(self, images: Float[Array, "batch height width channels"]) -> Float[Array, "batch patches pixels"]:
        side, patch = self.cfg.image_size // self.cfg.patch, self.cfg.patch
        cut = images.reshape(-1, side, patch, side, patch, self.cfg.channels)
        return cut.transpose(0, 1, 3, 2, 4, 5).reshape(-1, side * side, patch * patch * self.cfg.channels)
