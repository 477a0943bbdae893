"""Residual convolutional network (He et al., arXiv:1512.03385), normalised over channels so that no state crosses the batch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

from jaxmem import config
from jaxmem.models import parts
from jaxmem.models.parts import Execution
from jaxmem.sharding import Axes, constrain
from jaxmem.stack import apply_stack, stacked

Images = Float[Array, "batch height width channels"]


class Convolution(nnx.Module):
    """3 x 3, same size."""

    def __init__(self, rngs: nnx.Rngs, inputs: int, outputs: int, axes: Axes):
        self.weight = parts.weight(rngs, (3, 3, inputs, outputs), ("kernel", "kernel", *axes))

    def __call__(self, x: Float[Array, "batch height width inputs"]) -> Float[Array, "batch height width outputs"]:
        w = parts.fetch(self.weight, x.dtype)
        return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


class ConvBlock(nnx.Module):
    """Norm, activation, convolution, twice, beside the residual."""

    def __init__(self, rngs: nnx.Rngs, channels: int, dropout: float):
        self.first_norm, self.second_norm = parts.LayerNorm(channels), parts.LayerNorm(channels)
        self.first = Convolution(rngs, channels, channels, ("embed", "mlp"))
        self.second = Convolution(rngs, channels, channels, ("mlp", "embed"))
        self.dropout = dropout

    def __call__(self, x: Images, key: Key[Array, ""] | None) -> Images:
        y = self.first(jax.nn.relu(self.first_norm(x)))
        y = self.second(jax.nn.relu(self.second_norm(y)))
        return constrain(x + parts.dropout(y, self.dropout, key), "batch", None, None, "embed")


class Stage(nnx.Module):
    """Blocks of one width. The second and later stages begin by halving the image."""

    def __init__(self, rngs: nnx.Rngs, inputs: int, channels: int, cfg: config.Convnet, execution: Execution, pool: bool):
        self.widen = Convolution(rngs, inputs, channels, ("channels", "embed"))
        self.blocks = stacked(lambda rngs: ConvBlock(rngs, channels, cfg.dropout), cfg.blocks, rngs)
        self.count, self.remat, self.pool = cfg.blocks, execution.remat, pool

    def __call__(self, x: Images, key: Key[Array, ""] | None) -> Images:
        if self.pool:
            x = nnx.max_pool(x, (2, 2), (2, 2))
        x, _ = apply_stack(
            self.blocks,
            lambda block, x, key: (block(x, key), None),
            self.widen(x),
            parts.layer_keys(key, self.count),
            remat=self.remat,
        )
        return x


class Convnet(nnx.Module):
    def __init__(self, cfg: config.Convnet, rngs: nnx.Rngs, execution: Execution = Execution()):
        self.cfg, self.execution = cfg, execution
        widths = (cfg.channels, *cfg.stages)
        for i, (inputs, channels) in enumerate(zip(widths, widths[1:], strict=False)):
            setattr(self, f"stage_{i}", Stage(rngs, inputs, channels, cfg, execution, pool=i > 0))
        self.norm = parts.LayerNorm(cfg.stages[-1])
        self.head = parts.Linear(rngs, cfg.stages[-1], cfg.outputs, ("embed", "classes"), bias=True)

    def __call__(self, images: Images, key: Key[Array, ""] | None = None) -> Float[Array, "batch outputs"]:
        x = images.astype(self.execution.dtype)
        for i in range(len(self.cfg.stages)):
            x = getattr(self, f"stage_{i}")(x, None if key is None else jax.random.fold_in(key, i))
        return self.head(jnp.mean(self.norm(x), axis=(1, 2)))
