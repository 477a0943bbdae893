"""A stack of layers that is about to be applied, and the settings of how it is applied.

A network that cannot name its parts (the model of a script, `step/parts.py`) is run within `with
intercept_with(handler):`. There each stack that is about to be applied (`StackCall`) and each operation with a
vocabulary matrix (`models.vocab_slices.VocabOp`) is passed to `handler`, in the order of the computation. The result of
`handler` is used instead; if it is None, the operation is computed as usual.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax

from jaxmem.config.names import BOUNDARY
from jaxmem.quant import QTensor
from jaxmem.sharding.host import to_device, to_host
from jaxmem.stack.recompute_plan import RecomputePlan
from jaxmem.stack.remat import Remat, decode, encode
from jaxmem.typing import Tree

# (weights of a layer, x, the input of this layer, inputs shared by all layers) -> (x, output of this layer)
Run = Callable[[Tree, Tree, Tree, Tree], tuple[Tree, Tree]]


@runtime_checkable
class LayerOrder(Protocol):
    """An order in which the layers of a stack are stored. A network is created and applied without knowledge of it;
    `jaxmem.pipeline` stores layers by pipeline stage."""

    def create(self, layer: Callable[[jax.Array], Tree], keys: jax.Array) -> Tree:
        """The layers `layer(key)`, stacked in this order."""

    def apply(self, call: "StackCall") -> tuple[Tree, Tree]:
        """Applies the stored layers in the order of the network. Returns (x, stacked outputs)."""


@dataclass(frozen=True)
class StackOptions:
    """Settings for applying a stack, independent of its layers."""

    remat: Remat = "none"  # the name of a policy, or the names of saved activations
    order: LayerOrder | None = None  # how the layers are stored; None: in the order of the network
    # Names of activations that are offloaded to host memory; with BOUNDARY all saved activations.
    host: tuple[str, ...] = ()
    in_fp8: bool = False  # whether saved activations are in FP8


DEFAULTS = StackOptions()


@dataclass(frozen=True)
class StackCall:
    """A stack that is about to be applied."""

    run: Run
    weights: Tree  # the weights of all layers, stacked
    x: Tree
    inputs: Tree = None  # the inputs of all layers, stacked
    shared: Tree = None
    options: StackOptions = DEFAULTS
    plan: RecomputePlan | None = None  # the boundaries to save; None: all, and the activations that `run` saves

    @property
    def layers(self) -> int:
        count: int = jax.tree.leaves((self.weights, self.inputs))[0].shape[0]
        return count

    @property
    def rows(self) -> int:
        count: int = jax.tree.leaves(self.x)[0].shape[0]
        return count

    @property
    def on_host(self) -> bool:
        """Whether saved activations are offloaded to host memory."""
        return BOUNDARY in self.options.host

    def save(self, activations: Tree) -> Tree:
        return to_host(activations) if self.on_host else activations

    def load(self, activations: Tree) -> Tree:
        return to_device(activations) if self.on_host else activations

    def encode_boundary(self, x: Tree) -> Tree:
        """The input of a layer as it is saved."""
        return jax.tree.map(encode, x) if self.options.in_fp8 else x

    def save_boundary(self, x: Tree) -> Tree:
        return self.save(self.encode_boundary(x))

    def load_boundary(self, saved: Tree) -> Tree:
        x = self.load(saved)
        return jax.tree.map(decode, x, is_leaf=lambda leaf: isinstance(leaf, QTensor)) if self.options.in_fp8 else x


_creating: ContextVar[LayerOrder | None] = ContextVar("layer_order", default=None)


@contextmanager
def creating_in(order: LayerOrder | None) -> Iterator[None]:
    """A context in which new stacks of layers are stored in this order; None: in the order of the network."""
    token = _creating.set(order)
    try:
        yield
    finally:
        _creating.reset(token)


def create_layers(layer: Callable[[jax.Array], Tree], keys: jax.Array) -> Tree:
    """The layers `layer(key)`, stacked, created one after the other."""
    order = _creating.get()
    return jax.lax.map(layer, keys) if order is None else order.create(layer, keys)


_handler: ContextVar[Callable[[Any], Any] | None] = ContextVar("stack_handler", default=None)


@contextmanager
def intercept_with(handler: Callable[[Any], Any]) -> Iterator[None]:
    """A context in which stacks and operations with vocabulary matrices are passed to `handler` instead of computed."""
    token = _handler.set(handler)
    try:
        yield
    finally:
        _handler.reset(token)


def intercepted(part: Any) -> Any:
    """The result of the handler for this part; None if there is no handler, or it does not replace the part."""
    handler = _handler.get()
    return None if handler is None else handler(part)
