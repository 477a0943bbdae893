"""Networks for images: a residual MLP, a convolutional network and a vision transformer.

`Mlp`: pixels are numbers, or categories that are one-hot encoded or embedded. One-hot vectors make the first weight
`categories` times as large; embeddings make it 8 times as large.

`Convnet` (He et al., arXiv:1512.03385) has layer norm over the channels. A block of C channels on H x W pixels has 18
C^2 weights and takes 36 C^2 H W FLOPs per image forward, twice that backward; it saves about 6 C H W elements per image
for the backward pass.

`Vit` (Dosovitskiy et al., arXiv:2010.11929): patches become tokens. An image of s x s pixels has (s/p)^2 tokens, with
patches of p x p pixels. A layer costs as much as a decoder layer with as many tokens and without the causal mask.
"""

from itertools import pairwise

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Num

from jaxmem.config import networks
from jaxmem.models.attention import Attention, AttentionSpec
from jaxmem.models.block import Block, DenseMlp
from jaxmem.models.embedding import take_rows
from jaxmem.models.layers import LayerNorm, RowKeys, dropout, fetch, new_weight, split_keys
from jaxmem.models.linear import Linear
from jaxmem.models.network import Execution, Flow, Network, NetworkPart, Part, blocks_of
from jaxmem.sharding.arrays import constrain
from jaxmem.sharding.table import Axes
from jaxmem.stack.apply import stacked


class ImageNetwork(Network):
    """A network on images [batch, height, width, channels], with a linear `head`."""

    def __call__(
        self, images: Num[Array, "batch height width channels"], keys: RowKeys | None = None
    ) -> Float[Array, "batch outputs"]:
        """`keys` enables dropout."""
        return self.logits(self.features(images, keys))

    def logits(self, x: Float[Array, "batch embed"]) -> Float[Array, "batch outputs"]:
        return self.head(x)


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
        self.cfg = cfg
        self.execution = execution
        pixels = cfg.image_size**2 * cfg.channels
        width = {"numbers": 1, "one_hot": cfg.categories, "embedding": _EMBED}[cfg.inputs]
        embedded = cfg.inputs == "embedding"
        self.categories = new_weight(rngs, (cfg.categories, _EMBED), ("channels", None)) if embedded else None
        self.stem = Linear(rngs, pixels * width, cfg.embed, ("patch", "embed"), bias=True)
        self.blocks = stacked(lambda rngs: MlpBlock(rngs, cfg), cfg.layers, rngs)
        self.norm = LayerNorm(cfg.embed)
        self.head = Linear(rngs, cfg.embed, cfg.outputs, ("embed", "classes"), bias=True)

    def parts(
        self, images: Num[Array, "batch height width channels"], keys: RowKeys | None = None
    ) -> list[NetworkPart]:
        return [
            Part(lambda network, flow: flow._replace(x=network.embed(images))),
            blocks_of(("blocks",), keys, self.cfg.layers, self.execution.stack),
            Part(lambda network, flow: flow._replace(x=network.norm(flow.x))),
        ]

    def embed(self, images: Num[Array, "batch height width channels"]) -> Float[Array, "batch embed"]:
        dtype = self.execution.dtype
        pixels = images.reshape(images.shape[0], -1)
        if self.cfg.inputs == "one_hot":
            x = jax.nn.one_hot(pixels, self.cfg.categories, dtype=dtype)
        elif self.categories is not None:
            x = take_rows(fetch(self.categories, jnp.float32), pixels, dtype)
        else:
            x = pixels.astype(dtype)
        return constrain(self.stem(x.reshape(images.shape[0], -1)), "batch", "embed")


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
        self.first_norm = LayerNorm(channels)
        self.second_norm = LayerNorm(channels)
        self.first = Convolution(rngs, channels, channels, ("embed", "mlp"))
        self.second = Convolution(rngs, channels, channels, ("mlp", "embed"))
        self.dropout = dropout

    def __call__(self, x: Images, keys: RowKeys | None) -> Images:
        y = constrain(self.first(jax.nn.relu(self.first_norm(x))), "batch", "height", "width", "mlp")
        y = self.second(jax.nn.relu(self.second_norm(y)))
        return constrain(x + dropout(y, self.dropout, keys), "batch", "height", "width", "embed")


class Stage(nnx.Module):
    """Blocks of the same width. Stages after the first begin with a 2 x 2 max pooling."""

    def __init__(self, rngs: nnx.Rngs, inputs: int, channels: int, cfg: networks.Convnet, pool: bool):
        self.widen = Convolution(rngs, inputs, channels, ("channels", "embed"))
        self.blocks = stacked(lambda rngs: ConvBlock(rngs, channels, cfg.dropout), cfg.blocks, rngs)
        self.pool = pool

    def input_of_blocks(self, x: Images) -> Images:
        if self.pool:
            x = nnx.max_pool(x, (2, 2), (2, 2))
        return self.widen(x)


class Convnet(ImageNetwork):
    """Stages of residual blocks. The logits are computed from the mean over all positions."""

    def __init__(self, cfg: networks.Convnet, rngs: nnx.Rngs, execution: Execution = Execution()):
        self.cfg = cfg
        self.execution = execution
        widths = (cfg.channels, *cfg.stages)
        for i, (inputs, channels) in enumerate(pairwise(widths)):
            setattr(self, f"stage_{i}", Stage(rngs, inputs, channels, cfg, pool=i > 0))
        self.norm = LayerNorm(cfg.stages[-1])
        self.head = Linear(rngs, cfg.stages[-1], cfg.outputs, ("embed", "classes"), bias=True)

    def parts(self, images: Images, keys: RowKeys | None = None) -> list[NetworkPart]:
        count = len(self.cfg.stages)
        stage_keys = [None] * count if keys is None else split_keys(keys, count)
        parts: list[NetworkPart] = [Part(lambda network, flow: flow._replace(x=images.astype(network.execution.dtype)))]
        for i in range(count):
            parts += self._parts_of_stage(f"stage_{i}", stage_keys[i])
        return [*parts, Part(lambda network, flow: flow._replace(x=jnp.mean(network.norm(flow.x), axis=(1, 2))))]

    def _parts_of_stage(self, name: str, keys: RowKeys | None) -> list[NetworkPart]:
        def input_of_blocks(network: Convnet, flow: Flow) -> Flow:
            return flow._replace(x=getattr(network, name).input_of_blocks(flow.x))

        return [Part(input_of_blocks), blocks_of((name, "blocks"), keys, self.cfg.blocks, self.execution.stack)]


class Vit(ImageNetwork):
    """A transformer over patches with learned positions. The logits are computed from the mean over all patches."""

    def __init__(self, cfg: networks.Vit, rngs: nnx.Rngs, execution: Execution = Execution()):
        self.cfg = cfg
        self.execution = execution
        self.patches = Linear(rngs, cfg.patch**2 * cfg.channels, cfg.embed, ("patch", "embed"), bias=True)
        # Positions are as large as the embedded pixels, so that they differ from the first update on.
        self.position = new_weight(rngs, (cfg.patches, cfg.embed), ("patch", "embed"), scale=1.0)
        self.blocks = stacked(self._block, cfg.layers, rngs)
        self.norm = LayerNorm(cfg.embed)
        self.head = Linear(rngs, cfg.embed, cfg.outputs, ("embed", "classes"), bias=True)

    def _block(self, rngs: nnx.Rngs) -> Block:
        cfg = self.cfg
        spec = AttentionSpec(cfg.embed, cfg.heads, cfg.heads, cfg.embed // cfg.heads, causal=False, bias=True)
        attention = Attention(rngs, spec, self.execution)
        norms = LayerNorm(cfg.embed), LayerNorm(cfg.embed)
        return Block(attention, DenseMlp(rngs, cfg.embed, cfg.mlp), norms, cfg.dropout)

    def parts(
        self, images: Float[Array, "batch height width channels"], keys: RowKeys | None = None
    ) -> list[NetworkPart]:
        apply = lambda block, x, keys: block(x, keys=keys)[0]  # noqa: E731
        return [
            Part(lambda network, flow: flow._replace(x=network.embed(images))),
            blocks_of(("blocks",), keys, self.cfg.layers, self.execution.stack, apply),
            Part(lambda network, flow: flow._replace(x=jnp.mean(network.norm(flow.x), axis=1))),
        ]

    def embed(self, images: Float[Array, "batch height width channels"]) -> Float[Array, "batch patches embed"]:
        x = self.patches(self._patches(images).astype(self.execution.dtype))
        return constrain(x + fetch(self.position, x.dtype), "batch", "time", "embed")

    def _patches(self, images: Float[Array, "batch height width channels"]) -> Float[Array, "batch patches pixels"]:
        side = self.cfg.image_size // self.cfg.patch
        patch = self.cfg.patch
        cut = images.reshape(-1, side, patch, side, patch, self.cfg.channels)
        return cut.transpose(0, 1, 3, 2, 4, 5).reshape(-1, side * side, patch * patch * self.cfg.channels)
