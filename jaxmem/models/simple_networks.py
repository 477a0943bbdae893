"""What networks of equal layers share: stacks without further inputs, LayerNorm, and the base class for images."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Num

from jaxmem.models.layers import RowKeys, fetch, new_constant, normalize, split_keys
from jaxmem.models.network import Network
from jaxmem.stack import StackOptions, apply_stack, recompute_from_inputs


class ImageNetwork(Network):
    """A network on images [batch, height, width, channels], with a linear `head`."""

    def __call__(
        self, images: Num[Array, "batch height width channels"], keys: RowKeys | None = None
    ) -> Float[Array, "batch outputs"]:
        """`keys` enables dropout."""
        return self.logits(self.features(images, keys))

    def logits(self, x: Float[Array, "batch embed"]) -> Float[Array, "batch outputs"]:
        return self.head(x)


def apply_blocks(
    blocks: Any,
    x: Any,
    keys: RowKeys | None,
    layers: int,
    options: StackOptions,
    apply: Callable[..., Any] = lambda block, x, keys, _: block(x, keys),
    others: Any = None,
) -> Any:
    """Applies a stack of layers to `x`, each as `apply(block, x, dropout keys of the layer, others)`."""
    layer_keys = None if keys is None else split_keys(keys, layers)
    return apply_stack(blocks, lambda *inputs: (apply(*inputs), None), x, layer_keys, others, options=options)[0]


class LayerNorm(nnx.Module):
    """(x - mean) / standard deviation * scale + bias, in float32."""

    def __init__(self, size: int):
        self.scale = new_constant(1.0, (size,), ("norm",))
        self.bias = new_constant(0.0, (size,), ("norm",))

    def __call__(self, x: Float[Array, "*batch size"]) -> Float[Array, "*batch size"]:
        scale, bias = fetch(self.scale, jnp.float32), fetch(self.bias, jnp.float32)
        return recompute_from_inputs(partial(normalize, 1e-5), x, scale, bias)
