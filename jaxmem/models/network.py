"""Base classes of the networks of all families."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Num

from jaxmem.models.chunking import Chunking
from jaxmem.models.layers import RowKeys, split_keys
from jaxmem.stack import StackOptions, apply_stack

# Statistics of the routers of mixtures of experts for each token; only the first has a gradient.
STATISTICS = ("router_loss", "router_load", "router_entropy")


@dataclass(frozen=True)
class Execution:
    """Settings of the computation that do not depend on the weights."""

    dtype: np.dtype = np.dtype(np.float32)  # noqa: RUF009 - immutable. The compute dtype
    attention: str | None = None  # an implementation; None: chosen by device and shape
    experts: str = "blockwise"  # matmuls of experts: blockwise or triton
    deterministic: bool = False  # attention gradients are bitwise reproducible
    packed: bool = True  # a sequence may have several documents; false: one document, and padding
    max_segments: int | None = None  # limit of the segments of a packed sequence, including padding; None: unknown
    context_method: str = "ring"  # the communication of attention over `context`
    chunking: Chunking = Chunking()  # noqa: RUF009 - immutable
    stack: StackOptions = StackOptions()  # noqa: RUF009 - immutable


class Network(nnx.Module):
    """`features` computes the input of the output layer, `logits` its output."""

    cfg: Any
    execution: Execution
    head: Any  # the output layer; None: tied embeddings

    def features(self, *inputs: Any, **options: Any) -> jax.Array:
        raise NotImplementedError

    def features_and_router(self, *inputs: Any, **options: Any) -> tuple[jax.Array, jax.Array | None]:
        """Also returns the statistics of the routers of mixtures of experts, the mean over layers for each token."""
        return self.features(*inputs, **options), None

    def logits(self, x: jax.Array) -> jax.Array:
        raise NotImplementedError


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
