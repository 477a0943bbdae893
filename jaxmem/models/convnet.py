"""Residual convolutional network (He et al., arXiv:1512.03385) with layer norm over the channels.

A block of C channels on H x W pixels has 18 C^2 weights and takes 36 C^2 H W FLOPs per image forward, twice that
backward; it saves about 6 C H W elements per image for the backward pass.
"""

from itertools import pairwise

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxmem.config import networks
from jaxmem.models.layers import RowKeys, dropout, fetch, new_weight, split_keys
from jaxmem.models.linear import Linear
from jaxmem.models.network import Execution
from jaxmem.models.simple_networks import ImageNetwork, LayerNorm, apply_blocks
from jaxmem.sharding import Axes, constrain
from jaxmem.stack import stacked

Images = Float[Array, "_ _ _ _"]  # batch, height, width, channels
Kernel = Float[Array, "_ _ _ _"]  # height, width, inputs, outputs


class Convolution(nnx.Module):
    """A 3 x 3 convolution whose output has the size of its input."""

    def __init__(self, rngs: nnx.Rngs, inputs: int, outputs: int, axes: Axes):
        self.weight = new_weight(rngs, (3, 3, inputs, outputs), ("kernel", "kernel", *axes))

    def __call__(self, x: Images) -> Images:
        return convolve(x, fetch(self.weight, x.dtype))


@jax.custom_vjp
def convolve(x: Images, w: Kernel) -> Images:
    """A 3 x 3 convolution of the same size, padded with zeros."""
    return _correlate(x, w)


def _correlate(x: Images, w: Kernel) -> Images:
    return jax.lax.conv_general_dilated(x, w, (1, 1), ((1, 1), (1, 1)), dimension_numbers=("NHWC", "HWIO", "NHWC"))


def _gradients(x: Images, w: Kernel, g: Images) -> tuple[Images, Kernel]:
    return jax.vjp(_correlate, x, w)[1](g)


def _gradients_on_cpu(x: Images, w: Kernel, g: Images) -> tuple[Images, Kernel]:
    """The gradients, as convolutions in NHWC and HWIO order. Within a loop XLA's CPU code is fast only in these orders,
    and takes 50 times as long in the orders of jax's own derivative."""
    dx = _correlate(g, w[::-1, ::-1].transpose(0, 1, 3, 2))
    dw = _correlate(x.transpose(3, 1, 2, 0), g.transpose(1, 2, 0, 3))
    return dx, dw.transpose(1, 2, 0, 3)


convolve.defvjp(
    lambda x, w: (_correlate(x, w), (x, w)),
    lambda saved, g: jax.lax.platform_dependent(*saved, g, cpu=_gradients_on_cpu, default=_gradients),
)


class ConvBlock(nnx.Module):
    """x + two times (norm, ReLU, convolution) of x."""

    def __init__(self, rngs: nnx.Rngs, channels: int, dropout: float):
        self.first_norm, self.second_norm = LayerNorm(channels), LayerNorm(channels)
        self.first = Convolution(rngs, channels, channels, ("embed", "mlp"))
        self.second = Convolution(rngs, channels, channels, ("mlp", "embed"))
        self.dropout = dropout

    def __call__(self, x: Images, keys: RowKeys | None) -> Images:
        y = constrain(self.first(jax.nn.relu(self.first_norm(x))), "batch", "height", "width", "mlp")
        y = self.second(jax.nn.relu(self.second_norm(y)))
        return constrain(x + dropout(y, self.dropout, keys), "batch", "height", "width", "embed")


class Stage(nnx.Module):
    """Blocks of the same width. Stages after the first begin with a 2 x 2 max pooling."""

    def __init__(
        self, rngs: nnx.Rngs, inputs: int, channels: int, cfg: networks.Convnet, execution: Execution, pool: bool
    ):
        self.widen = Convolution(rngs, inputs, channels, ("channels", "embed"))
        self.blocks = stacked(lambda rngs: ConvBlock(rngs, channels, cfg.dropout), cfg.blocks, rngs)
        self.count, self.stack, self.pool = cfg.blocks, execution.stack, pool

    def __call__(self, x: Images, keys: RowKeys | None) -> Images:
        if self.pool:
            x = nnx.max_pool(x, (2, 2), (2, 2))
        return apply_blocks(self.blocks, self.widen(x), keys, self.count, self.stack)


class Convnet(ImageNetwork):
    """Stages of residual blocks. The logits are computed from the mean over all positions."""

    def __init__(self, cfg: networks.Convnet, rngs: nnx.Rngs, execution: Execution = Execution()):
        self.cfg, self.execution = cfg, execution
        widths = (cfg.channels, *cfg.stages)
        for i, (inputs, channels) in enumerate(pairwise(widths)):
            setattr(self, f"stage_{i}", Stage(rngs, inputs, channels, cfg, execution, pool=i > 0))
        self.norm = LayerNorm(cfg.stages[-1])
        self.head = Linear(rngs, cfg.stages[-1], cfg.outputs, ("embed", "classes"), bias=True)

    def features(self, images: Images, keys: RowKeys | None = None) -> Float[Array, "batch embed"]:
        x = images.astype(self.execution.dtype)
        count = len(self.cfg.stages)
        own = [None] * count if keys is None else split_keys(keys, count)
        for i in range(count):
            x = getattr(self, f"stage_{i}")(x, own[i])
        return jnp.mean(self.norm(x), axis=(1, 2))
