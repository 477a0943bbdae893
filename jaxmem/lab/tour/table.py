"""Tables of measurements: rows of plain data, printed by rich at any width and written as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Table as Grid
from rich.text import Text

Row = Mapping[str, Any]  # column name -> number, text, or None for an empty cell; the first column names the row

SCALES = {  # unit -> (what one is, digits); the unit is added to the heading
    "GiB": (2**30, ".2f"),
    "MiB": (2**20, ".2f"),
    "GB": (1e9, ".1f"),
    "MB": (1e6, ",.0f"),
    "billions": (1e9, ",.1f"),
    "TFLOP": (1e12, ".2f"),
    "s": (1, ".2f"),
    "ms": (1e-3, ",.1f"),
}


def cell(value: Any, spec: str = "") -> str:
    """A value as text. `spec`: a unit of SCALES, `bytes`, `count`, `time`, or a format specification.

    >>> cell(3 * 2**29, "GiB"), cell(0.25, ".0%"), cell(None, ".2f"), cell(1234), cell(4e-5, "time")
    ('1.50', '25%', '', '1,234', '40.0 us')
    """
    from jaxmem.planning.units import format_bytes, format_count

    if value is None or isinstance(value, str):
        return value or ""
    if spec in SCALES:
        scale, digits = SCALES[spec]
        return format(value / scale, digits)
    if spec == "bytes":
        return format_bytes(value)
    if spec == "count":
        return format_count(value)
    if spec == "time":
        return f"{value * 1e3:,.1f} ms" if value >= 1e-4 else f"{value * 1e6:,.1f} us"
    return format(value, spec or ("," if isinstance(value, int) else ""))


def with_unit(name: str, spec: str) -> str:
    """A heading or an axis label: the name, and the unit if the numbers have one."""
    return f"{name}, {spec}" if spec in SCALES else name


@dataclass(frozen=True)
class Table:
    """Rows with the same columns. A column without a value in any row is left out, as is one whose format is None."""

    title: str
    rows: Sequence[Row]
    formats: Mapping[str, str | None] = field(default_factory=dict)  # column -> format of its numbers (see `cell`)

    @property
    def _columns(self) -> list[str]:
        shown = [name for name in self.rows[0] if self.formats.get(name, "") is not None]
        return [name for name in shown if any(row[name] is not None for row in self.rows)]

    @property
    def headings(self) -> list[str]:
        return [with_unit(name, self.formats.get(name) or "") for name in self._columns]

    @property
    def cells(self) -> list[list[str]]:
        return [[cell(row[name], self.formats.get(name) or "") for name in self._columns] for row in self.rows]

    @property
    def _aligned_right(self) -> list[bool]:
        """Columns with numbers, but not the first."""
        _, *columns = ([row[name] for row in self.rows] for name in self._columns)
        return [False, *(any(isinstance(value, int | float) for value in column) for column in columns)]

    def markdown(self) -> str:
        rules = ["---:" if right else "---" for right in self._aligned_right]
        lines = [f"| {' | '.join(cells)} |" for cells in (self.headings, rules, *self.cells)]
        return "\n".join([self.title, "", *lines])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        """A grid; one field per line where the terminal is too narrow for the longest words."""
        widths = self._widths(options.max_width)
        if widths is not None:
            grid = Grid(title=self.title, title_justify="left")
            for heading, right, width in zip(self.headings, self._aligned_right, widths, strict=True):
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
        yield Text()

    def _widths(self, available: int) -> list[int] | None:
        """Column widths that break no word, the smallest shortfalls filled first; None if there is no room."""
        full, words = [], []
        for cells in zip(self.headings, *self.cells, strict=True):
            full.append(max(map(len, cells)))
            words.append(max(len(word) for text in cells for word in text.split() or [""]))
        spare = available - sum(words) - 3 * len(words) - 1  # a border and two spaces per column
        if spare < 0:
            return None
        for i in sorted(range(len(words)), key=lambda i: full[i] - words[i]):
            more = min(full[i] - words[i], spare)
            words[i], spare = words[i] + more, spare - more
        return words
