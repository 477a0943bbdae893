"""What a network is: its parts, in the order of its forward pass, and the base class of the networks of all families.

A network of the config names its parts: its stacks of layers, its operations with an embedding or output matrix, each
with the path of its weights, and functions in between. So a step can compute and differentiate the parts one after the
other (`step/update_during.py`), and pipeline stages can compute the layers apart from the parts around them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from jaxmem.models.chunking import Chunking
from jaxmem.models.layers import RowKeys, split_keys
from jaxmem.models.vocab_slices import VocabOpResult
from jaxmem.sharding.trees import Path
from jaxmem.stack.apply import apply_call, stack_call
from jaxmem.stack.call import StackCall, StackOptions
from jaxmem.typing import Tree

# Statistics of the routers of mixtures of experts for each token; only the first has a gradient.
STATISTICS = ("router_loss", "router_load", "router_entropy")


@dataclass(frozen=True)
class Execution:
    """Settings of the computation that do not depend on the weights."""

    dtype: np.dtype = np.dtype(np.float32)  # the compute dtype  # noqa: RUF009 - immutable
    attention: str = "blockwise"  # an implementation of `kernels.attention`
    experts: str = "blockwise"  # matmuls of experts: blockwise or triton
    packed: bool = True  # a sequence may have several documents; false: one document, and padding
    max_segments: int | None = None  # largest number of segments of a packed sequence, with padding; None: unknown
    context_method: str = "ring"  # the communication of attention over `context`
    chunking: Chunking = Chunking()  # noqa: RUF009 - immutable
    stack: StackOptions = StackOptions()  # noqa: RUF009 - immutable


class Flow(NamedTuple):
    """What a part passes to the next one."""

    x: Tree  # what the next part transforms
    # What only a later part uses, e.g. the features of the other tower; stacks and matrices pass it on.
    kept: Any = None


START = Flow(None)


@dataclass(frozen=True)
class Part:
    """A function of the weights outside of stacks."""

    run: Callable[[Any, Flow], Any]  # (network, result of the part before) -> result


@dataclass(frozen=True)
class MatrixPart(Part):
    """An embedding lookup, or an output projection with its loss."""

    path: Path  # of the matrix
    # The result of `run`, and functions for its gradients; None if other operations of this part use the matrix.
    separate: Callable[[Any, Flow], VocabOpResult | None]


@dataclass(frozen=True)
class Layers:
    """A stack of layers."""

    path: Path  # of its weights
    call: Callable[[Any, Flow], StackCall]

    def run(self, network: Any, flow: Flow) -> Flow:
        return flow._replace(x=apply_call(self.call(network, flow))[0])


NetworkPart = Part | Layers


def run_parts(network: Any, parts: Sequence[NetworkPart], flow: Flow = START) -> Any:
    """The result of the last part."""
    return reduce(lambda flow, part: part.run(network, flow), parts, flow)


class Network(nnx.Module):
    """`features` computes the input of the output layer, `logits` its output. A network defines `parts`, or `features`
    if it cannot name its parts."""

    cfg: Any
    execution: Execution
    head: Any  # the output layer; None: tied embeddings

    def parts(self, *inputs: Tree, **options: Any) -> list[NetworkPart]:
        """The parts, of which the last one returns Flow(features, statistics of routers or None)."""
        raise NotImplementedError

    def features(self, *inputs: Tree, **options: Any) -> jax.Array:
        return self.features_and_router_statistics(*inputs, **options)[0]

    def features_and_router_statistics(self, *inputs: Tree, **options: Any) -> tuple[jax.Array, jax.Array | None]:
        """Also returns the statistics of the routers of mixtures of experts, the mean over layers for each token."""
        if not names_parts(self):
            return self.features(*inputs, **options), None
        flow = run_parts(self, self.parts(*inputs, **options))
        return flow.x, flow.kept

    def logits(self, x: jax.Array) -> jax.Array:
        raise NotImplementedError


def names_parts(network: object) -> bool:
    """Whether a network names its parts. The features of a derived class may be others than those of its parts."""
    if not isinstance(network, Network):
        return hasattr(network, "parts")
    kind = type(network)
    inherited = (Network.features, Network.features_and_router_statistics)
    return (kind.features, kind.features_and_router_statistics) == inherited and kind.parts is not Network.parts


Apply = Callable[[Any, Any, RowKeys | None], Any]  # (block, x, dropout keys of the layer) -> x


def _call(block: Any, x: Tree, keys: RowKeys | None) -> Any:
    return block(x, keys)


def blocks_call(
    blocks: Tree, x: Tree, keys: RowKeys | None, layers: int, options: StackOptions, apply: Apply = _call
) -> StackCall:
    """A stack of layers without further inputs, each applied as `apply(block, x, dropout keys of the layer)`."""
    layer_keys = None if keys is None else split_keys(keys, layers)
    return stack_call(blocks, lambda *inputs: (apply(*inputs[:3]), None), x, layer_keys, options=options)


def apply_blocks(
    blocks: Tree, x: Tree, keys: RowKeys | None, layers: int, options: StackOptions, apply: Apply = _call
) -> Any:
    """The output of the stack of `blocks_call`."""
    return apply_call(blocks_call(blocks, x, keys, layers, options, apply))[0]


def blocks_of(path: Path, keys: RowKeys | None, layers: int, options: StackOptions, apply: Apply = _call) -> Layers:
    """The stack of `blocks_call` as a part of a network."""

    def call(network: Any, flow: Flow) -> StackCall:
        blocks = reduce(getattr, path, network)
        return blocks_call(blocks, flow.x, keys, layers, options, apply)

    return Layers(path, call)
