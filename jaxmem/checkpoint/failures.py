"""What Orbax and TensorStore say when they fail, made one line.

Orbax also tells of each of its steps, to the root logger of absl. That is silenced: what goes wrong reaches the user
as an exception.
"""

from __future__ import annotations

import gc
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

# What they raise on files that are not as they were written, and on disks that are full.
FAILURES = (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError)

logging.getLogger("absl").addFilter(lambda record: "/orbax/checkpoint/" not in record.pathname)


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
