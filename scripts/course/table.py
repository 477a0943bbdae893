"""Tables of plain data, printed by rich for any width of the terminal, and written as Markdown; and the panels of a
figure, bars and lines, which matplotlib draws in one style."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

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


if TYPE_CHECKING:
    from matplotlib.axes import Axes

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Bars:
    """A bar per row of a table, which stacks its `parts` (columns) and shows their sum; `grouped`: a bar and a number
    per part. `title`: by default the table's title. `limits`: labelled vertical lines; the scale is then
    logarithmic."""

    table: Table
    parts: Sequence[str]
    title: str = ""
    grouped: bool = False
    limits: Mapping[str, float] = field(default_factory=dict)

    def draw(self, axes: Axes) -> None:
        count = len(self.table.rows)
        height = 0.8 / (len(self.parts) if self.grouped else 1)
        left = [0.0] * count
        for number, part in enumerate(self.parts):
            values = [value or 0.0 for value in self.table.column(part)]
            at = [place + (number * height if self.grouped else 0.0) for place in range(count)]
            bars = axes.barh(at, values, height, left=None if self.grouped else left, label=part)
            left = [a + b for a, b in zip(left, values, strict=True)]
            if self.grouped or part == self.parts[-1]:
                shown = format_column(values if self.grouped else left)
                white = {"fc": "white", "ec": "none", "pad": 1}
                axes.bar_label(bars, shown, fontsize=7, padding=2, bbox=white if self.limits else None)
        middle = (0.8 - height) / 2 if self.grouped else 0.0
        names = [str(next(iter(row.values()))) for row in self.table.rows]
        axes.set_yticks([place + middle for place in range(count)], names)
        axes.invert_yaxis()
        axes.margins(x=0.2)
        axes.set(title=self.title or self.table.title, xlabel=self.parts[0] if len(self.parts) == 1 else "")
        if self.limits:
            axes.set(xscale="log", xlabel=f"{axes.get_xlabel()}, logarithmic")
            axes.set_xlim(left=min(self.limits.values()) / 2)
            axes.set_xticks([], minor=True)
            axes.set_xticks(list(self.limits.values()), [name.replace(" ", "\n", 1) for name in self.limits])
            for value in self.limits.values():
                axes.axvline(value, color="black", lw=1, ls="--", zorder=0)


@dataclass(frozen=True)
class LinePlot:
    """Series of points. A series with one point is a marker."""

    title: str
    x: str  # axis labels, with units
    y: str
    series: Mapping[str, Points]
    log: str = ""  # the axes with a logarithmic scale: "x", "y" or "xy"

    @classmethod
    def of(cls, table: Table, x: str, y: str, columns: Sequence[str], log: str = "") -> LinePlot:
        """A line per column."""
        series = {name: list(zip(table.column(x), table.column(name), strict=True)) for name in columns}
        return cls(table.title, x, y, series, log)

    def draw(self, axes: Axes) -> None:
        for number, (name, points) in enumerate(self.series.items()):
            # Long series may overlap, so their markers are at different points.
            every = (number, len(self.series)) if len(points) > 20 else None
            marker = "osD^vPX*"[number // 10] if len(points) == 1 else "o"
            width = 1.2 if len(points) > 1 else 0.0
            axes.plot(*zip(*points, strict=True), marker=marker, ms=5, lw=width, markevery=every, label=name)
        axes.set(title=self.title, xlabel=self.x, ylabel=self.y)
        for axis in self.log:
            axes.set(**{f"{axis}scale": "log"})


@dataclass(frozen=True)
class Ticks:
    """A pipeline schedule: a row per stage, a column per tick, a colour per operation."""

    title: str
    stages: Sequence[str]  # a letter per tick: F forward, B backward, W weight gradients
    colours: Mapping[str, tuple[str, str]]  # letter -> (operation, colour)

    def draw(self, axes: Axes) -> None:
        for letter, (name, colour) in self.colours.items():
            cells = [(t, s) for s, row in enumerate(self.stages) for t, cell in enumerate(row) if cell == letter]
            if cells:
                ticks, stages = zip(*cells, strict=True)
                axes.barh(stages, [0.94] * len(cells), 0.9, left=ticks, color=colour, label=name)
        axes.set_yticks(range(len(self.stages)))
        axes.invert_yaxis()
        axes.set(title=self.title, xlabel="tick", ylabel="stage")


Panel = Bars | LinePlot | Ticks


def draw(path: Path, panels: Sequence[Panel]) -> None:
    """A PNG with the panels side by side."""
    from jaxmem.report.figure import figure  # imports jax, which each stop must configure before

    tallest = max((len(panel.table.rows) for panel in panels if isinstance(panel, Bars)), default=0)
    with figure(path, max(9, 4.5 * len(panels)), max(4.5, 0.35 * tallest)) as drawn:
        for axes, panel in zip(drawn.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            panel.draw(axes)
            axes.tick_params(labelsize=8)
            axes.grid(alpha=0.3, axis="both" if isinstance(panel, LinePlot) else "x")
            axes.title.set_fontsize(10)
            if len(axes.get_legend_handles_labels()[0]) > 1:
                axes.legend(fontsize=7)
