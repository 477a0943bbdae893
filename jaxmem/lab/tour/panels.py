"""The panels of a stop's figure: bars and lines as data, drawn by matplotlib in one style."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from jaxmem.lab.tour.table import SCALES, Row, cell, with_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Bars:
    """One bar per row, from the top, with the sum (stacked) or each value (grouped) written beside it."""

    title: str
    rows: Sequence[Row]
    parts: Sequence[str]  # columns of the rows
    spec: str = ""  # unit or format of the numbers, as in a Table
    grouped: bool = False
    begin: str = ""  # the column with the value at which a bar begins, in place of 0
    log: bool = False
    labels: bool = True

    def draw(self, axes: Axes) -> None:
        if self.log:  # before the bars, which are autoscaled for it
            axes.set_xscale("log")
        scale, _ = SCALES.get(self.spec, (1, ""))
        places = range(len(self.rows))
        height = 0.8 / (len(self.parts) if self.grouped else 1)
        begin = [row[self.begin] / scale if self.begin else 0.0 for row in self.rows]
        for number, part in enumerate(self.parts):
            values = [row[part] or 0 for row in self.rows]
            at = [place + (number * height if self.grouped else 0.0) for place in places]
            bars = axes.barh(at, [value / scale for value in values], height, left=begin, label=part)
            if not self.grouped:
                begin = [left + value / scale for left, value in zip(begin, values, strict=True)]
                values = [left * scale for left in begin]
            if self.labels and (self.grouped or part == self.parts[-1]):
                axes.bar_label(bars, [cell(value, self.spec) for value in values], fontsize=7, padding=2)
        middle = (0.8 - height) / 2 if self.grouped else 0.0
        axes.set_yticks([place + middle for place in places], [str(next(iter(row.values()))) for row in self.rows])
        axes.invert_yaxis()
        axes.margins(x=0.2)
        if self.begin and self.log:
            axes.set_xlim(min(row[self.begin] for row in self.rows) / scale)
        axes.set(title=self.title, xlabel=with_unit("", self.spec).removeprefix(", "))
        if len(self.parts) > 1:
            axes.legend(fontsize=7)


@dataclass(frozen=True)
class Lines:
    """Series of points; a series of one point is a marker."""

    title: str
    x: str  # axis labels, with units
    y: str
    series: Mapping[str, Points]
    log: str = ""  # the axes with a logarithmic scale: "x", "y" or "xy"
    ticks: Mapping[float, str] = field(default_factory=dict)  # texts on the x axis

    def draw(self, axes: Axes) -> None:
        for number, (name, points) in enumerate(self.series.items()):
            # Long series may lie on each other: each has its markers at places of its own.
            every = (number, len(self.series)) if len(points) > 20 else None
            marker = "osD^vPX*"[number // 10] if len(points) == 1 else "o"
            width = 1.2 if len(points) > 1 else 0.0
            axes.plot(*zip(*points, strict=True), marker=marker, ms=5, lw=width, markevery=every, label=name)
        axes.set(title=self.title, xlabel=self.x, ylabel=self.y)
        for axis in self.log:
            axes.set(**{f"{axis}scale": "log"})
        if self.ticks:
            long = max(map(len, self.ticks.values())) > 8
            axes.set_xticks(
                [*self.ticks], [*self.ticks.values()], rotation=40 if long else 0, ha="right" if long else "center"
            )
            axes.minorticks_off()
        if len(self.series) > 1:
            axes.legend(fontsize=7)


Panel = Bars | Lines


def draw(path: Path, panels: Sequence[Panel]) -> None:
    """A PNG with the panels side by side."""
    from jaxmem.report.matplotlib_figure import figure  # its package loads jax, which a stop starts in its own way

    tallest = max((len(panel.rows) for panel in panels if isinstance(panel, Bars)), default=0)
    with figure(path, max(9, 4.5 * len(panels)), max(4.5, 0.35 * tallest)) as drawn:
        for axes, panel in zip(drawn.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            panel.draw(axes)
            axes.tick_params(labelsize=8)
            axes.grid(alpha=0.3, axis="both" if isinstance(panel, Lines) else "x")
            axes.title.set_fontsize(10)
