"""Base classes of the networks of all families."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxmem.models.chunking import Chunking
from jaxmem.models.layers import RowKeys, split_keys
from jaxmem.stack import StackOptions, apply_stack
from jaxmem.typing import Tree

# Statistics of the routers of mixtures of experts for each token; only the first has a gradient.
STATISTICS = ("router_loss", "router_load", "router_entropy")


@dataclass(frozen=True)
class Execution:
    """Settings of the computation that do not depend on the weights."""

    dtype: np.dtype = np.dtype(np.float32)  # the compute dtype  # noqa: RUF009 - immutable
    attention: str | None = None  # an implementation; None: chosen by device and shape
    experts: str = "blockwise"  # matmuls of experts: blockwise or triton
    deterministic: bool = False  # attention gradients are bitwise reproducible
    packed: bool = True  # a sequence may have several documents; false: one document, and padding
    max_segments: int | None = None  # largest number of segments of a packed sequence, with padding; None: unknown
    context_method: str = "ring"  # the communication of attention over `context`
    chunking: Chunking = Chunking()  # noqa: RUF009 - immutable
    stack: StackOptions = StackOptions()  # noqa: RUF009 - immutable


class Network(nnx.Module):
    """`features` computes the input of the output layer, `logits` its output."""

    cfg: Any
    execution: Execution
    head: Any  # the output layer; None: tied embeddings

    def features(self, *inputs: Tree, **options: Any) -> jax.Array:
        raise NotImplementedError

    def features_and_router_statistics(self, *inputs: Tree, **options: Any) -> tuple[jax.Array, jax.Array | None]:
        """Also returns the statistics of the routers of mixtures of experts, the mean over layers for each token."""
        return self.features(*inputs, **options), None

    def logits(self, x: jax.Array) -> jax.Array:
        raise NotImplementedError


def apply_blocks(
    blocks: Tree,
    x: Tree,
    keys: RowKeys | None,
    layers: int,
    options: StackOptions,
    apply: Callable[[Any, Any, Any], Any] = lambda block, x, keys: block(x, keys),
) -> Tree:
    """Applies a stack of layers without further inputs to `x`, each as `apply(block, x, dropout keys of the layer)`."""
    layer_keys = None if keys is None else split_keys(keys, layers)
    return apply_stack(blocks, lambda *inputs: (apply(*inputs[:3]), None), x, layer_keys, options=options)[0]
