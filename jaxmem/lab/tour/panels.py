"""The panels of a figure, bars and lines, as data that matplotlib draws in one style."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from jaxmem.lab.tour.table import Table, format_column

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
                shown, white = format_column(values if self.grouped else left), {"fc": "white", "ec": "none", "pad": 1}
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
class Lines:
    """Series of points. A series with one point is a marker."""

    title: str
    x: str  # axis labels, with units
    y: str
    series: Mapping[str, Points]
    log: str = ""  # the axes with a logarithmic scale: "x", "y" or "xy"

    @classmethod
    def of(cls, table: Table, x: str, y: str, columns: Sequence[str], log: str = "") -> Lines:
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


Panel = Bars | Lines


def draw(path: Path, panels: Sequence[Panel]) -> None:
    """A PNG with the panels side by side."""
    from jaxmem.report.figure import figure  # imports jax, which each stop must configure before

    tallest = max((len(panel.table.rows) for panel in panels if isinstance(panel, Bars)), default=0)
    with figure(path, max(9, 4.5 * len(panels)), max(4.5, 0.35 * tallest)) as drawn:
        for axes, panel in zip(drawn.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            panel.draw(axes)
            axes.tick_params(labelsize=8)
            axes.grid(alpha=0.3, axis="both" if isinstance(panel, Lines) else "x")
            axes.title.set_fontsize(10)
            if len(axes.get_legend_handles_labels()[0]) > 1:
                axes.legend(fontsize=7)
