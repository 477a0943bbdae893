"""Intercepting the stacks of layers and the embedding and output matrices of a network that cannot name its parts: the
model of a script (`step/intercepted_parts.py`).

Within `with intercept_with(handler):`, each stack that is about to be applied (`StackCall`) and each operation with a
vocabulary matrix (`models.vocab_slices.VocabOp`) is passed to `handler`, in the order of the computation. The result of
`handler` is used instead; if it is None, the operation is computed as usual.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

Handler = Callable[[Any], Any]

_handler: ContextVar[Handler | None] = ContextVar("stack_handler", default=None)


@contextmanager
def intercept_with(handler: Handler) -> Iterator[None]:
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
