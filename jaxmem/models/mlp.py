"""Residual dense network. Pixels come in as numbers, one-hot or as a learned row for each category.

One-hot makes the first weight `categories` times as large; the learned rows 8 times, whatever the categories.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Num

from jaxmem import config
from jaxmem.models import parts
from jaxmem.models.block import DenseMlp
from jaxmem.models.parts import Execution
from jaxmem.sharding import constrain
from jaxmem.stack import apply_stack, stacked

_EMBEDDED = 8  # numbers in the learned row of a pixel's category


class MlpBlock(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, cfg: config.Mlp):
        self.norm = parts.LayerNorm(cfg.embed)
        self.mlp = DenseMlp(rngs, cfg.embed, cfg.mlp)
        self.dropout = cfg.dropout

    def __call__(self, x: Float[Array, "batch embed"], keys: parts.RowKeys | None) -> Float[Array, "batch embed"]:
        first, second = (None, None) if keys is None else parts.several(keys, 2)
        made = self.mlp(self.norm(x), second)
        return constrain(x + parts.dropout(made, self.dropout, first), "batch", "embed")


class Mlp(nnx.Module):
    def __init__(self, cfg: config.Mlp, rngs: nnx.Rngs, execution: Execution = Execution()):
        self.cfg, self.execution = cfg, execution
        pixels = cfg.image_size**2 * cfg.channels
        width = {"numbers": 1, "one_hot": cfg.categories, "embedding": _EMBEDDED}[cfg.inputs]
        embedded = cfg.inputs == "embedding"
        self.categories = parts.weight(rngs, (cfg.categories, _EMBEDDED), ("channels", None)) if embedded else None
        self.stem = parts.Linear(rngs, pixels * width, cfg.embed, ("patch", "embed"), bias=True)
        self.blocks = stacked(lambda rngs: MlpBlock(rngs, cfg), cfg.layers, rngs)
        self.norm = parts.LayerNorm(cfg.embed)
        self.head = parts.Linear(rngs, cfg.embed, cfg.outputs, ("embed", "classes"), bias=True)

    def __call__(
        self, images: Num[Array, "batch height width channels"], keys: parts.RowKeys | None = None
    ) -> Float[Array, "batch outputs"]:
        return self.logits(self.features(images, keys))

    def features(
        self, images: Num[Array, "batch height width channels"], keys: parts.RowKeys | None = None
    ) -> Float[Array, "batch embed"]:
        dtype = self.execution.dtype
        pixels = images.reshape(images.shape[0], -1)
        if self.cfg.inputs == "one_hot":
            x = jax.nn.one_hot(pixels, self.cfg.categories, dtype=dtype)
        elif self.categories is not None:
            x = jnp.take(parts.fetch(self.categories, dtype), pixels, axis=0)
        else:
            x = pixels.astype(dtype)
        x = constrain(self.stem(x.reshape(images.shape[0], -1)), "batch", "embed")
        x, _ = apply_stack(
            self.blocks,
            lambda block, x, keys, _: (block(x, keys), None),
            x,
            parts.layer_keys(keys, self.cfg.layers),
            options=self.execution.stack,
        )
        return self.norm(x)

    def logits(self, x: Float[Array, "batch embed"]) -> Float[Array, "batch outputs"]:
        return self.head(x)
