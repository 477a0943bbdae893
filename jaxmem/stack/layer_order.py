"""How the layers of a stack are stored: in the order of the network, or in an order of another package.

A network is created and applied without knowledge of that order. `jaxmem.pipeline` stores layers by pipeline stage.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol, runtime_checkable

import jax

from jaxmem.stack.interception import StackCall


@runtime_checkable
class LayerOrder(Protocol):
    """An order in which the layers of a stack are stored."""

    def create(self, layer: Callable[[jax.Array], Any], keys: jax.Array) -> Any:
        """The layers `layer(key)`, stacked in this order."""

    def apply(self, call: StackCall) -> tuple[Any, Any]:
        """Applies the stored layers in the order of the network. Returns (x, stacked outputs)."""


_creating: ContextVar[LayerOrder | None] = ContextVar("layer_order", default=None)


@contextmanager
def creating_in(order: LayerOrder | None) -> Iterator[None]:
    """A context in which new stacks of layers are stored in this order; None: in the order of the network."""
    token = _creating.set(order)
    try:
        yield
    finally:
        _creating.reset(token)


def create_layers(layer: Callable[[jax.Array], Any], keys: jax.Array) -> Any:
    """The layers `layer(key)`, stacked, created one after the other."""
    order = _creating.get()
    return jax.lax.map(layer, keys) if order is None else order.create(layer, keys)
