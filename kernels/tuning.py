"""How kernels are cut: into blocks of sizes that were measured to be the fastest on this kind of device, or the usual.

Each kernel says, where it is called, its usual sizes, and all those that a GPU has room for. `jaxmem bench tune`
measures these and keeps the winners in `tuned.json`, under an operation's "blocks".
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

from jaxmem.kernels.choice import device_kind, nearest_entry, tuned

# Bytes of shared memory that a block may have, by compute capability (CUDA programming guide).
SHARED = {"8.0": 166912, "8.6": 101376, "8.9": 101376, "9.0": 232448, "10.0": 232448, "12.0": 101376}
REGISTERS = 224  # numbers that a thread may hold, of its 255 registers

Space = Callable[[int], list[Any]]  # of so many bytes of shared memory
Blocks = TypeVar("Blocks", bound=tuple[int, ...])


class Asked(NamedTuple):
    """A kernel that was called."""

    kernel: str  # implementation and pass
    kind: str  # what of a call changes everything
    sizes: tuple[int, ...]  # what changes it gradually
    space: Space


_forced: ContextVar[tuple[str, tuple[int, ...]] | None] = ContextVar("forced", default=None)
_listening: ContextVar[dict[str, Asked] | None] = ContextVar("asked", default=None)


def table(operation: str) -> str:
    """Where its winners stand.

    >>> table("attention")
    'attention blocks'
    """
    return f"{operation} blocks"


def blocks(operation: str, request: Asked, usual: Blocks) -> Blocks:
    """What this call is cut into: what was the fastest on this kind of device, of the nearest sizes."""
    if (heard := _listening.get()) is not None:
        heard[request.kernel] = request
    forced = _forced.get()
    if forced is not None and forced[0] == request.kernel:
        return _like(usual, forced[1])
    if not tuned().get(table(operation)):
        return usual
    entry = nearest_entry(tuned(), table(operation), device_kind(), f"{request.kernel} {request.kind}", request.sizes)
    return usual if entry is None else _like(usual, entry["blocks"])


def _like(usual: Any, sizes: Any) -> Any:
    return type(usual)(*sizes)


@contextmanager
def forced(kernel: str, sizes: tuple[int, ...]) -> Iterator[None]:
    """Calls within are cut so: to measure them."""
    token = _forced.set((kernel, sizes))
    try:
        yield
    finally:
        _forced.reset(token)


@contextmanager
def listening() -> Iterator[dict[str, Asked]]:
    """Which kernels are called in here, by name."""
    heard: dict[str, Asked] = {}
    token = _listening.set(heard)
    try:
        yield heard
    finally:
        _listening.reset(token)
