"""Results with a table: `print` writes it, and a notebook shows it."""

import io
import shutil
from typing import Any

NOTEBOOK_WIDTH = 100  # characters per line of a table in a notebook
_HTML = '<pre style="line-height: 1.2; font-family: monospace">{code}</pre>'


class Printed:
    """A result that `print` writes as a table as wide as the terminal. `repr` is one line."""

    def table(self) -> Any:
        raise NotImplementedError

    def __str__(self) -> str:
        console = self._console(shutil.get_terminal_size().columns)
        return console.export_text().rstrip("\n")

    def _repr_html_(self) -> str:
        return self._console(NOTEBOOK_WIDTH).export_html(code_format=_HTML, inline_styles=True)

    def _console(self, width: int) -> Any:
        """A console that has recorded the table."""
        from jaxmem.machine.console import Console

        console = Console(file=io.StringIO(), width=width, record=True)
        table = self.table()
        console.print(table, markup=not isinstance(table, str), crop=False)
        return console
