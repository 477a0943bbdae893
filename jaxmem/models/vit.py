"""Vision transformer (Dosovitskiy et al., arXiv:2010.11929): patches become tokens.

An image of s x s pixels has (s/p)^2 tokens, with patches of p x p pixels. A layer costs as much as a decoder layer with
as many tokens and without the causal mask.
"""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxmem.config import networks
from jaxmem.models.attention import Attention, AttentionSpec
from jaxmem.models.block import Block, DenseMlp
from jaxmem.models.layers import RowKeys, fetch, new_weight
from jaxmem.models.linear import Linear
from jaxmem.models.network import Execution
from jaxmem.models.simple_networks import ImageNetwork, LayerNorm, apply_blocks
from jaxmem.sharding import constrain
from jaxmem.stack import stacked


class Vit(ImageNetwork):
    """A transformer over patches with learned positions. The logits are computed from the mean over all patches."""

    def __init__(self, cfg: networks.Vit, rngs: nnx.Rngs, execution: Execution = Execution()):
        self.cfg, self.execution = cfg, execution
        patches = (cfg.image_size // cfg.patch) ** 2
        self.patches = Linear(rngs, cfg.patch**2 * cfg.channels, cfg.embed, ("patch", "embed"), bias=True)
        # Positions are as large as the embedded pixels, so that they differ from the first update on.
        self.position = new_weight(rngs, (patches, cfg.embed), ("patch", "embed"), scale=1.0)
        self.blocks = stacked(self._block, cfg.layers, rngs)
        self.norm = LayerNorm(cfg.embed)
        self.head = Linear(rngs, cfg.embed, cfg.outputs, ("embed", "classes"), bias=True)

    def _block(self, rngs: nnx.Rngs) -> Block:
        cfg = self.cfg
        spec = AttentionSpec(cfg.embed, cfg.heads, cfg.heads, cfg.embed // cfg.heads, causal=False, bias=True)
        attention = Attention(rngs, spec, self.execution)
        norms = LayerNorm(cfg.embed), LayerNorm(cfg.embed)
        return Block(attention, DenseMlp(rngs, cfg.embed, cfg.mlp), norms, cfg.dropout)

    def features(
        self, images: Float[Array, "batch height width channels"], keys: RowKeys | None = None
    ) -> Float[Array, "batch embed"]:
        x = self.patches(self._patches(images).astype(self.execution.dtype))
        x = constrain(x + fetch(self.position, x.dtype), "batch", "time", "embed")
        apply = lambda block, x, keys, _: block(x, keys=keys)[0]  # noqa: E731
        x = apply_blocks(self.blocks, x, keys, self.cfg.layers, self.execution.stack, apply)
        return jnp.mean(self.norm(x), axis=1)

    def _patches(self, images: Float[Array, "batch height width channels"]) -> Float[Array, "batch patches pixels"]:
        side, patch = self.cfg.image_size // self.cfg.patch, self.cfg.patch
        cut = images.reshape(-1, side, patch, side, patch, self.cfg.channels)
        return cut.transpose(0, 1, 3, 2, 4, 5).reshape(-1, side * side, patch * patch * self.cfg.channels)
