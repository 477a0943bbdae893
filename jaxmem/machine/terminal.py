"""Lines for a terminal. Names of files and columns, templates and warnings of other libraries can contain commands for
it, so control characters are escaped. `jaxmem.machine.console` does the same for tables."""

import shutil
import sys
import textwrap
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
