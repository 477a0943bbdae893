"""Intercepting the stacks of layers and the embedding and output matrices of a network, without changing the network.

Within `with intercept_with(handler):`, each stack that is about to be applied (`StackCall`) and each operation with a
vocabulary matrix (`models.vocab_slices.VocabOp`) is passed to `handler`, in the order of the computation. The result of
`handler` is used instead; if it is None, the operation is computed as usual.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import get_opaque_trace_state

from jaxmem.sharding.host import to_device, to_host
from jaxmem.stack.schedule import Schedule

# (weights of a layer, x, the input of this layer, inputs shared by all layers) -> (x, output of this layer)
Run = Callable[[Any, Any, Any, Any], tuple[Any, Any]]
Handler = Callable[[Any], Any]

_handler: ContextVar[Handler | None] = ContextVar("stack_handler", default=None)


@dataclass(frozen=True)
class StackCall:
    """A stack that is about to be applied."""

    run: Run
    weights: Any  # the weights of all layers, stacked
    x: Any
    inputs: Any  # the inputs of all layers, stacked
    shared: Any
    on_host: bool = False  # whether saved activations are offloaded to host memory
    plan: Schedule | None = None  # the boundaries to save; None: all, and the activations that `run` saves

    @property
    def layers(self) -> int:
        count: int = jax.tree.leaves((self.weights, self.inputs))[0].shape[0]
        return count

    def save(self, activations: Any) -> Any:
        return to_host(activations) if self.on_host else activations

    def load(self, activations: Any) -> Any:
        return to_device(activations) if self.on_host else activations


@contextmanager
def intercept_with(handler: Handler) -> Iterator[None]:
    """A context in which stacks and operations with vocabulary matrices are passed to `handler` instead of computed."""
    token = _handler.set(handler)
    try:
        yield
    finally:
        _handler.reset(token)


def is_intercepted() -> bool:
    return _handler.get() is not None


def intercepted(part: Any) -> Any:
    """The result of the handler for this part; None if there is no handler, or it does not replace the part."""
    handler = _handler.get()
    return None if handler is None else handler(part)


def applies_stacks_once(function: Callable[..., Any], *arguments: Any) -> bool:
    """Whether a function of weights applies each stack of layers at most once, and not within a loop of its own."""
    stacks: list[Any] = []
    states: list[Any] = []

    def note(part: Any) -> None:
        if isinstance(part, StackCall):
            stacks.append(part.weights)
            states.append(get_opaque_trace_state(convention="jaxmem"))

    def traced(*arguments: Any) -> Any:
        states.append(get_opaque_trace_state(convention="jaxmem"))
        with intercept_with(note):
            return function(*arguments)

    jax.eval_shape(traced, *arguments)
    is_once = len({id(jax.tree.leaves(weights)[0]) for weights in stacks}) == len(stacks)
    return is_once and all(state == states[0] for state in states)
