"""Lines for a terminal. Names of files and columns, templates and warnings of other libraries can contain commands for
it, so control characters are escaped. `jaxmem.machine.console` does the same for tables."""

import os
import shutil
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from jaxmem.errors import escaped


def say(*lines: object, file: TextIO | None = None) -> None:
    """Prints lines at once, to standard output by default."""
    for line in lines:
        print(escaped(str(line)), file=sys.stdout if file is None else file, flush=True)


def say_text(*texts: object, file: TextIO | None = None) -> None:
    """Prints sentences. On a terminal, lines break between words. Commands and JSON, which are copied, need `say`."""
    stream = sys.stdout if file is None else file
    lines = [line for text in texts for line in escaped(str(text)).split("\n")]
    if stream.isatty():
        width = shutil.get_terminal_size().columns
        lines = [textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False) for line in lines]
    say(*lines, file=file)


@contextmanager
def filtered_stderr(passed: Callable[[bytes], bytes]) -> Iterator[None]:
    """A context that collects standard error, also of C++ libraries, which do not use Python's `sys.stderr`. At its
    end, `passed(collected bytes)` is written to standard error."""
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
