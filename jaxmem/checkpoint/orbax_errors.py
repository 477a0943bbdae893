"""Errors of Orbax and TensorStore, reduced to one line."""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import jax
import orbax.checkpoint as ocp

from jaxmem.distributed.watch import lost_process_error

# Errors that Orbax and TensorStore raise for damaged files and full disks.
ORBAX_EXCEPTIONS = (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError)

ORBAX_PATH = "/orbax/checkpoint/"


def only_first_error() -> ExitStack:
    """Until the returned stack is closed, Orbax logs nothing, and errors that follow a failed read or write are not
    printed.

    The failure itself is raised as an exception. Orbax then closes its event loop while TensorStore still reads or
    writes other arrays, each of which reports the closed loop when it ends: in a thread of TensorStore to
    `sys.unraisablehook`, or to the log of asyncio. Several such stacks may be closed in any order.
    """
    stack = ExitStack()
    is_closed = False
    previous = sys.unraisablehook

    def report(failure: sys.UnraisableHookArgs) -> None:
        if is_closed or failure.object is not None or str(failure.exc_value) != "Event loop is closed":
            previous(failure)

    def remove() -> None:
        nonlocal is_closed
        is_closed = True
        if sys.unraisablehook is report:  # otherwise another hook calls this one, which passes everything on
            sys.unraisablehook = previous

    sys.unraisablehook = report
    stack.callback(remove)
    for name, passes in (("absl", _is_of_another_library), ("asyncio", _is_no_follow_up)):
        record_filter = partial(passes)  # an object of its own, since a logger holds equal filters only once
        logging.getLogger(name).addFilter(record_filter)
        stack.callback(logging.getLogger(name).removeFilter, record_filter)
    return stack


def _is_of_another_library(record: logging.LogRecord) -> bool:
    return ORBAX_PATH not in record.pathname


def _is_no_follow_up(record: logging.LogRecord) -> bool:
    """Whether a log record belongs neither to a task of Orbax nor to a write of TensorStore that failed after the
    failure that is raised. Exceptions that TensorStore sets in its own threads have no frames of Python."""
    frames = list(traceback.walk_tb(record.exc_info[2] if record.exc_info else None))
    is_of_tensorstore = record.exc_info is not None and not frames
    is_of_orbax = any(ORBAX_PATH in frame.f_code.co_filename for frame, _ in frames)
    return "never retrieved" not in record.getMessage() or not (is_of_tensorstore or is_of_orbax)


def root_cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    text = " ".join(str(error).split(" [tensorstore_spec")[0].split())
    if isinstance(error, LookupError) or not text:  # the text of a KeyError is only the key
        text = f"{type(error).__name__} {text}"
    return text if len(text) <= 200 else f"... {text[-200:]}"  # the cause comes last


def raise_lost_process(error: BaseException) -> None:
    """Raises the error of a lost process, which the watch reports, so that no file is reported as damaged."""
    if jax.process_count() > 1 and (failure := lost_process_error(error)):
        raise failure


class Manager(ocp.CheckpointManager):
    """Reports immediately if this process could not write its shards. By default Orbax first waits for the other
    processes, which wait for these shards."""

    def __init__(self, *args: Any, failed: Callable[[BaseException], None], **options: Any) -> None:
        self._failed = failed
        super().__init__(*args, **options)

    def _wait_for_checkpointers(self) -> None:
        try:
            super()._wait_for_checkpointers()
        except BaseException as error:
            self._failed(error)
            raise
