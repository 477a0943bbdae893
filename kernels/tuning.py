"""The block sizes of kernels: the fastest ones measured on this kind of device, or defaults.

A kernel passes, where it is called, its default sizes and a function that lists all sizes that fit on a GPU. `jaxmem
bench tune` measures these and stores the fastest in `tuned.json`, under "OPERATION blocks".
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar, cast

from jaxmem.kernels.choice import device_kind, nearest_entry, override, tuned

# Bytes of shared memory that a block may have, by compute capability (CUDA programming guide).
SHARED = {"8.0": 166912, "8.6": 101376, "8.9": 101376, "9.0": 232448, "10.0": 232448, "12.0": 101376}
REGISTERS = 224  # numbers that a thread may hold, of its 255 registers

Sizes = tuple[int, ...]
Blocks = TypeVar("Blocks", bound=Sizes)


class KernelCall(NamedTuple):
    kernel: str  # implementation and pass
    kind: str  # discrete properties that its time depends on
    sizes: Sizes  # continuous ones
    space: Callable[[int], list[Any]]  # bytes of shared memory -> the block sizes that fit


_forced: ContextVar[tuple[str, Sizes] | None] = ContextVar("forced", default=None)
_recorded: ContextVar[dict[str, KernelCall] | None] = ContextVar("recorded calls", default=None)


def table(operation: str) -> str:
    """The key of an operation's block sizes in `tuned.json`.

    >>> table("attention")
    'attention blocks'
    """
    return f"{operation} blocks"


def blocks(operation: str, call: KernelCall, default: Blocks) -> Blocks:
    """The block sizes of a call: the fastest on this kind of device, from the entry of the nearest sizes."""
    if (recorded := _recorded.get()) is not None:
        recorded[call.kernel] = call
    forced, kind = _forced.get(), cast(Any, type(default))
    if forced is not None and forced[0] == call.kernel:
        return kind(*forced[1])
    if not tuned().get(table(operation)):
        return default
    entry = nearest_entry(tuned(), table(operation), device_kind(), f"{call.kernel} {call.kind}", call.sizes)
    return default if entry is None else kind(*entry["blocks"])


def force_blocks(kernel: str, sizes: Sizes) -> AbstractContextManager[Any]:
    """A context in which a kernel has these block sizes, to measure them."""
    return override(_forced, (kernel, sizes))


def record_calls() -> AbstractContextManager[dict[str, KernelCall]]:
    """A context that records the calls of kernels, by name."""
    return override(_recorded, {})
