"""Lines for a terminal. Names of files and columns, templates and warnings of other libraries can contain commands for
it, so control characters are escaped. `jaxmem.machine.console` does the same for tables."""

import sys
from typing import TextIO

from jaxmem.errors import escaped


def say(*lines: object, file: TextIO | None = None) -> None:
    """Prints lines at once, to standard output by default."""
    for line in lines:
        print(escaped(str(line)), file=sys.stdout if file is None else file, flush=True)
