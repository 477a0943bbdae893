"""Cutting a network at its stacks of layers and at its embedding and output matrices, without changing the network.

Within `with cut_by(handler):`, each stack that is about to be applied (`stack.apply.StackCall`) and each operation with
a vocabulary matrix (`models.vocab_slices.VocabOp`) is passed to `handler`, in the order of the computation. The result
of `handler` is used instead; if it is None, the operation is computed as usual.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

Handler = Callable[[Any], Any]

_handler: ContextVar[Handler | None] = ContextVar("cut_handler", default=None)


@contextmanager
def cut_by(handler: Handler) -> Iterator[None]:
    """A context in which stacks and operations with vocabulary matrices are passed to `handler` instead of computed."""
    token = _handler.set(handler)
    try:
        yield
    finally:
        _handler.reset(token)


def is_cut() -> bool:
    return _handler.get() is not None


def cut(part: Any) -> Any:
    """The result of the handler for this part; None if there is no handler, or it does not replace the part."""
    handler = _handler.get()
    return None if handler is None else handler(part)
