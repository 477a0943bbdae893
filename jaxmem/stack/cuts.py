"""Cutting a network at its stacks of layers and at its embedding and output matrices, without the network knowing.

Within `with cut_by(handler):` each stack that is about to be applied (`stack.apply.StackCall`) and each vocabulary
matrix that is about to be computed with (`models.vocab_slices.VocabOp`) is given to `handler`, in the order in which
the network computes. What `handler` returns takes the place of the result; None: compute as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

Handler = Callable[[Any], Any]

_handler: ContextVar[Handler | None] = ContextVar("cut_handler", default=None)


@contextmanager
def cut_by(handler: Handler) -> Iterator[None]:
    """Within it, stacks and vocabulary matrices are given to `handler` instead of being computed."""
    token = _handler.set(handler)
    try:
        yield
    finally:
        _handler.reset(token)


def is_cut() -> bool:
    return _handler.get() is not None


def cut(part: Any) -> Any:
    """What the handler returns for this part; None: there is no handler, or it leaves the part as it is."""
    handler = _handler.get()
    return None if handler is None else handler(part)
