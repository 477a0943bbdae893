"""Residual MLP. Pixels are numbers, or categories that are one-hot encoded or embedded.

One-hot vectors make the first weight `categories` times as large; embeddings make it 8 times as large.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Num

from jaxmem.config import networks
from jaxmem.models.block import DenseMlp
from jaxmem.models.layers import RowKeys, dropout, fetch, new_weight, split_keys
from jaxmem.models.linear import Linear
from jaxmem.models.network import Execution
from jaxmem.models.simple_networks import ImageNetwork, LayerNorm, apply_blocks
from jaxmem.sharding import constrain
from jaxmem.stack import stacked

_EMBED = 8  # features of a category's embedding


class MlpBlock(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, cfg: networks.Mlp):
        self.norm = LayerNorm(cfg.embed)
        self.mlp = DenseMlp(rngs, cfg.embed, cfg.mlp)
        self.dropout = cfg.dropout

    def __call__(self, x: Float[Array, "batch embed"], keys: RowKeys | None) -> Float[Array, "batch embed"]:
        first, second = (None, None) if keys is None else split_keys(keys, 2)
        y = dropout(self.mlp(self.norm(x), second), self.dropout, first)
        return constrain(x + y, "batch", "embed")


class Mlp(ImageNetwork):
    """Residual dense blocks on the flattened image."""

    def __init__(self, cfg: networks.Mlp, rngs: nnx.Rngs, execution: Execution = Execution()):
        self.cfg, self.execution = cfg, execution
        pixels = cfg.image_size**2 * cfg.channels
        width = {"numbers": 1, "one_hot": cfg.categories, "embedding": _EMBED}[cfg.inputs]
        embedded = cfg.inputs == "embedding"
        self.categories = new_weight(rngs, (cfg.categories, _EMBED), ("channels", None)) if embedded else None
        self.stem = Linear(rngs, pixels * width, cfg.embed, ("patch", "embed"), bias=True)
        self.blocks = stacked(lambda rngs: MlpBlock(rngs, cfg), cfg.layers, rngs)
        self.norm = LayerNorm(cfg.embed)
        self.head = Linear(rngs, cfg.embed, cfg.outputs, ("embed", "classes"), bias=True)

    def features(
        self, images: Num[Array, "batch height width channels"], keys: RowKeys | None = None
    ) -> Float[Array, "batch embed"]:
        dtype = self.execution.dtype
        pixels = images.reshape(images.shape[0], -1)
        if self.cfg.inputs == "one_hot":
            x = jax.nn.one_hot(pixels, self.cfg.categories, dtype=dtype)
        elif self.categories is not None:
            x = jnp.take(fetch(self.categories, dtype), pixels, axis=0)
        else:
            x = pixels.astype(dtype)
        x = constrain(self.stem(x.reshape(images.shape[0], -1)), "batch", "embed")
        return self.norm(apply_blocks(self.blocks, x, keys, self.cfg.layers, self.execution.stack))
