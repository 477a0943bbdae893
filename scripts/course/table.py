"""Tables of plain data, printed by rich for any width of the terminal, and written as Markdown."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table as Grid
from rich.text import Text

# Column name -> number, text, or None for an empty cell. The first column names the row; names of columns have units.
Row = Mapping[str, Any]


def gib(size: float | None) -> float | None:
    """Bytes in GiB; None stays None."""
    return None if size is None else size / 2**30


def format_column(values: Sequence[Any]) -> list[str]:
    """The cells of a column. Numbers have the decimals that the largest number needs for four digits; if they differ by
    orders of magnitude, each has three digits.

    >>> format_column([40.56, 8.3, None, "none"]), format_column([3e-7, 0.25, 131379.0]), format_column([1234, 5])
    (['40.56', '8.30', '', 'none'], ['3e-07', '0.25', '131,379'], ['1,234', '5'])
    """
    sizes = [abs(value) for value in values if isinstance(value, float) and value]
    if sizes and min(sizes) >= 1e-2 and max(sizes) <= 1e3 * min(sizes):
        decimals = min(3, max(0, 3 - math.floor(math.log10(max(sizes)))))
        return [format(value, f",.{decimals}f") if isinstance(value, float) else _format(value) for value in values]
    return [_format(value) for value in values]


def _format(value: object) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, int) or abs(value) >= 100:
        return format(value, ",.0f")
    return format(value, ".3g")


@dataclass(frozen=True)
class Table:
    """Rows with the same columns. Columns that are `hidden`, or that have no value in any row, are not shown."""

    title: str
    rows: Sequence[Row]
    hidden: Sequence[str] = ()

    @property
    def headings(self) -> list[str]:
        shown = [name for name in self.rows[0] if name not in self.hidden]
        return [name for name in shown if any(value is not None for value in self.column(name))]

    def column(self, name: str) -> list[Any]:
        return [row[name] for row in self.rows]

    @property
    def cells(self) -> list[list[str]]:
        columns = [format_column(self.column(name)) for name in self.headings]
        return [list(cells) for cells in zip(*columns, strict=True)]

    @property
    def _is_right(self) -> list[bool]:
        """Columns with numbers, except the first."""
        numbers = [any(isinstance(value, int | float) for value in self.column(name)) for name in self.headings]
        return [False, *numbers[1:]]

    def markdown(self) -> str:
        rules = ["---:" if right else "---" for right in self._is_right]
        lines = [f"| {' | '.join(cells)} |" for cells in (self.headings, rules, *self.cells)]
        return "\n".join([self.title, "", *lines] if self.title else lines)

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> RenderResult:
        """A grid; one field per line if the terminal is too narrow for the longest words."""
        widths = self._widths(options.max_width)
        if widths is not None:
            grid = Grid(title=self.title, title_justify="left")
            for heading, right, width in zip(self.headings, self._is_right, widths, strict=True):
                grid.add_column(heading, justify="right" if right else "left", width=width)
            for cells in self.cells:
                grid.add_row(*map(Text, cells))
            yield grid
            return
        yield Text(self.title, style="italic")
        for name, *cells in self.cells:
            yield Text(name, style="bold")
            for heading, text in zip(self.headings[1:], cells, strict=True):
                if text:
                    yield Text(f"  {heading}: {text}")

    def _widths(self, available: int) -> list[int] | None:
        """Column widths that break no word. Columns that need the least additional width are widened first. None: the
        terminal is too narrow."""
        columns = list(zip(self.headings, *self.cells, strict=True))
        full = [max(map(len, cells)) for cells in columns]
        widths = [max(len(word) for text in cells for word in text.split() or [""]) for cells in columns]
        spare = available - sum(widths) - 3 * len(widths) - 1  # a border and two spaces per column
        if spare < 0:
            return None
        for i in sorted(range(len(widths)), key=lambda i: full[i] - widths[i]):
            growth = min(full[i] - widths[i], spare)
            widths[i] = widths[i] + growth
            spare = spare - growth
        return widths
