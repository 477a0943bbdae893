"""The base class of networks on images, and stacks of layers without further inputs."""

from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Float, Num

from jaxmem.models.layers import RowKeys, split_keys
from jaxmem.models.network import Network
from jaxmem.stack import StackOptions, apply_stack


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
