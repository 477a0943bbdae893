"""A console of rich that escapes control characters in what it prints, and results that print a table with it."""

import io
import shutil
from collections.abc import Iterable
from typing import Any

import rich.console
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment

from jaxmem.errors import escaped

NOTEBOOK_WIDTH = 100  # characters per line of a table in a notebook
_HTML = '<pre style="line-height: 1.2; font-family: monospace">{code}</pre>'


class Console(rich.console.Console):
    """Prints tables and lines. Names of files and columns in them can contain commands for a terminal."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=escaped(segment.text))


class Printed:
    """A result that `print` writes as a table as wide as the terminal. `repr` is one line."""

    def table(self) -> Any:
        """What rich prints: the result itself if it has `__rich_console__`, or other text or a table."""
        if not hasattr(self, "__rich_console__"):  # rich would print its `str`, which prints the table
            raise NotImplementedError
        return self

    def __str__(self) -> str:
        console = self._console(shutil.get_terminal_size().columns)
        return console.export_text().rstrip("\n")

    def _repr_html_(self) -> str:
        return self._console(NOTEBOOK_WIDTH).export_html(code_format=_HTML, inline_styles=True)

    def _console(self, width: int) -> Console:
        """A console that has recorded the table."""
        console = Console(file=io.StringIO(), width=width, record=True)
        table = self.table()
        console.print(table, markup=not isinstance(table, str), crop=False)
        return console
