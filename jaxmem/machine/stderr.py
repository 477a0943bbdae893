"""Filters the output of C++ libraries to standard error, which does not pass through Python's `sys.stderr`."""

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def filtered(passed: Callable[[bytes], bytes]) -> Iterator[None]:
    """A context that collects standard error. At its end, `passed(collected bytes)` is written to standard error."""
    sys.stderr.flush()
    with tempfile.TemporaryFile() as log:
        real = os.dup(2)
        os.dup2(log.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(real, 2)
            log.seek(0)
            os.write(2, passed(log.read()))
            os.close(real)
