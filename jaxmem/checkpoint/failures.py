"""What Orbax and TensorStore say when they fail, made one line.

Orbax also tells of each of its steps, to the root logger of absl. That is silenced: what goes wrong reaches the user
as an exception. So is what its other writes say when the first has failed: they end on an event loop that is closed.
"""

from __future__ import annotations

import gc
import logging
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

# What they raise on files that are not as they were written, and on disks that are full.
FAILURES = (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError)

ORBAX = "/orbax/checkpoint/"
_told = sys.unraisablehook


def _is_leftover(record: logging.LogRecord) -> bool:
    """Whether a task of Orbax's has failed beside the one whose failure is told."""
    frames = traceback.walk_tb(record.exc_info[2] if record.exc_info else None)
    return "never retrieved" in record.getMessage() and any(ORBAX in frame.f_code.co_filename for frame, _ in frames)


logging.getLogger("absl").addFilter(lambda record: ORBAX not in record.pathname)
logging.getLogger("asyncio").addFilter(lambda record: not _is_leftover(record))


def _but_leftovers(failure: sys.UnraisableHookArgs) -> None:
    if str(failure.exc_value) != "Event loop is closed":
        _told(failure)


sys.unraisablehook = _but_leftovers  # TensorStore's threads call it; the run goes on, or says why it does not


def why(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    text = " ".join(str(error).split(" [tensorstore_spec")[0].split())
    if isinstance(error, LookupError) or not text:  # a KeyError's text is only the key
        text = f"{type(error).__name__} {text}"
    return text if len(text) <= 200 else f"... {text[-200:]}"  # they end with the cause


@contextmanager
def one_failure() -> Iterator[None]:
    """Where one read fails, Orbax leaves the others under way, on an event loop that it has closed: each would tell of
    itself in a page of its own, through hooks that belong to nobody. The first is the one that is told."""
    told = sys.unraisablehook, sys.excepthook
    talk = logging.getLogger("asyncio")
    talk.addFilter(_nothing)
    sys.unraisablehook = sys.excepthook = _nothing
    try:
        yield
    except BaseException:
        time.sleep(0.2)  # for the reads of a local disk to end
        gc.collect()
        raise
    finally:
        sys.unraisablehook, sys.excepthook = told
        talk.removeFilter(_nothing)


def _nothing(*_: object) -> bool:
    return False
