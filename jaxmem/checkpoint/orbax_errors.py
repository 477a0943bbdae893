"""Errors of Orbax and TensorStore, reduced to one line.

Orbax logs each of its steps to absl's root logger. These logs are silenced, because errors reach the user as
exceptions. After the first failed write, errors of other writes are silenced too: they only report a closed event loop.
"""

from __future__ import annotations

import gc
import logging
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import orbax.checkpoint as ocp

from jaxmem.distributed.watch import lost_process_error

# Errors that Orbax and TensorStore raise for damaged files and full disks.
ORBAX_EXCEPTIONS = (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError)

ORBAX_PATH = "/orbax/checkpoint/"
_unraisable = sys.unraisablehook


def _is_follow_up(record: logging.LogRecord) -> bool:
    """Whether a log record belongs to a task of Orbax that failed after the task whose failure is reported."""
    frames = traceback.walk_tb(record.exc_info[2] if record.exc_info else None)
    return "never retrieved" in record.getMessage() and any(
        ORBAX_PATH in frame.f_code.co_filename for frame, _ in frames
    )


logging.getLogger("absl").addFilter(lambda record: ORBAX_PATH not in record.pathname)
logging.getLogger("asyncio").addFilter(lambda record: not _is_follow_up(record))


def _report_unraisable(failure: sys.UnraisableHookArgs) -> None:
    text = str(failure.exc_value)
    if text != "Event loop is closed" and "_ssock" not in text:  # an event loop without file descriptors has no _ssock
        _unraisable(failure)


warnings.filterwarnings("ignore", r"coroutine '.*' was never awaited", RuntimeWarning)  # if there is no event loop
sys.unraisablehook = _report_unraisable  # called from TensorStore's threads


def root_cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    text = " ".join(str(error).split(" [tensorstore_spec")[0].split())
    if isinstance(error, LookupError) or not text:  # the text of a KeyError is only the key
        text = f"{type(error).__name__} {text}"
    return text if len(text) <= 200 else f"... {text[-200:]}"  # the cause comes last


@contextmanager
def first_failure_only() -> Iterator[None]:
    """Raises only the first failure of a restore. If one read fails, Orbax leaves the others running on a closed event
    loop, and each prints a long traceback through hooks of the interpreter; these are silenced."""
    hooks = sys.unraisablehook, sys.excepthook
    asyncio_log = logging.getLogger("asyncio")
    asyncio_log.addFilter(_ignore)
    sys.unraisablehook = sys.excepthook = _ignore
    try:
        yield
    except BaseException:
        time.sleep(0.2)  # reads of a local disk end within this time
        gc.collect()
        raise
    finally:
        sys.unraisablehook, sys.excepthook = hooks
        asyncio_log.removeFilter(_ignore)


def _ignore(*_: object) -> bool:
    return False


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
