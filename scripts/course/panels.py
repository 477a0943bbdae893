"""The panels of a figure, which matplotlib draws in one style. Colours differ in brightness, lines also in their dashes
and markers, so that figures are readable in grey."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.course.table import Table, format_column

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Points = Sequence[tuple[float, float]]
# From dark to light, distinct also with colour blindness.
COLOURS = ("#0b3c5d", "#d55e00", "#56b4e9", "#e69f00", "#7a8c9c", "#cc79a7", "#bfd7ea", "#f0e442")
DASHES = ("-", "--", ":", "-.")
MARKERS = "osD^vPX*"
PALE, DARK = "#e8edf2", "#0b3c5d"


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
    inches: float | None = None  # the height; None: by the number of rows
    end: float | None = None  # where the axis ends, so that panels have one scale

    @property
    def height(self) -> float:
        return self.inches or max(4.5, 0.35 * len(self.table.rows))

    def draw(self, axes: Axes) -> None:
        count = len(self.table.rows)
        height = 0.8 / (len(self.parts) if self.grouped else 1)
        left = [0.0] * count
        for number, part in enumerate(self.parts):
            values = [value or 0 for value in self.table.column(part)]
            at = [place + (number * height if self.grouped else 0.0) for place in range(count)]
            colour = COLOURS[number % len(COLOURS)]
            bars = axes.barh(at, values, height, left=None if self.grouped else left, label=part, color=colour)
            left = [a + b for a, b in zip(left, values, strict=True)]
            if self.grouped or part == self.parts[-1]:
                shown = format_column(values if self.grouped or len(self.parts) == 1 else left)
                white = {"fc": "white", "ec": "none", "pad": 1}
                axes.bar_label(bars, shown, fontsize=7, padding=2, bbox=white if self.limits else None)
        middle = (0.8 - height) / 2 if self.grouped else 0.0
        names = [str(next(iter(row.values()))) for row in self.table.rows]
        axes.set_yticks([place + middle for place in range(count)], names)
        axes.invert_yaxis()
        axes.margins(x=0.2)
        axes.set_xlim(right=self.end)
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
    """Series of points. A series with one point is a marker. `limits`: labelled horizontal lines."""

    title: str
    x: str  # axis labels, with units
    y: str
    series: Mapping[str, Points]
    log: str = ""  # the axes with a logarithmic scale: "x", "y" or "xy"
    limits: Mapping[str, float] = field(default_factory=dict)
    names: Sequence[str] = ()  # of the heights 0, 1, 2, ... in place of numbers
    height: float = 4.5

    @classmethod
    def of(cls, table: Table, x: str, y: str, columns: Sequence[str], log: str = "") -> LinePlot:
        """A line per column."""
        series = {name: list(zip(table.column(x), table.column(name), strict=True)) for name in columns}
        return cls(table.title, x, y, series, log)

    def draw(self, axes: Axes) -> None:
        from matplotlib.ticker import LogFormatter

        for number, (name, points) in enumerate(self.series.items()):
            # Long series may overlap, so their markers are at different points.
            every = (number, max(len(self.series), len(points) // 10)) if len(points) > 20 else None
            width = 1.4 if len(points) > 1 else 0.0
            axes.plot(
                *zip(*points, strict=True),
                marker=MARKERS[number % len(MARKERS)],
                color=COLOURS[number % len(COLOURS)],
                ls=DASHES[number % len(DASHES)],
                ms=5,
                lw=width,
                markevery=every,
                mfc=None if number < len(COLOURS) else "white",  # the styles repeat
                label="" if self.names else name,
            )
        axes.set(title=self.title, xlabel=self.x, ylabel=self.y)
        for axis in self.log:
            axes.set(**{f"{axis}scale": "log"})
            scaled = axes.xaxis if axis == "x" else axes.yaxis
            scaled.set_major_formatter("{x:g}")
            scaled.set_minor_formatter(LogFormatter(minor_thresholds=(1.5, 0.5)))
        places = sorted({x for points in self.series.values() for x, _ in points})
        are_apart = all(1.2 * place < following for place, following in itertools.pairwise(places))
        if "x" in self.log and len(places) <= 10 and are_apart:
            axes.set_xticks([], minor=True)
            axes.set_xticks(places, [f"{place:g}" for place in places])
        if self.names:
            axes.set_yticks(range(len(self.names)), self.names)
        for name, value in self.limits.items():
            axes.axhline(value, color="black", lw=1, ls=(0, (5, 5)), zorder=0)
            axes.annotate(name, (0.01, value), xycoords=("axes fraction", "data"), va="bottom", fontsize=7)


@dataclass(frozen=True)
class Cells:
    """A row per name and a cell per letter. `key`: letter -> (meaning, colour); other letters stay empty."""

    title: str
    rows: Mapping[str, str]
    key: Mapping[str, tuple[str, str]]
    x: str = "tick"
    y: str = "stage"
    row: float = 0.25  # the height of a row in inches
    end: float | None = None  # where the axis ends, so that panels have one scale

    @property
    def height(self) -> float:
        return 1.0 + self.row * len(self.rows)

    def draw(self, axes: Axes) -> None:
        for letter, (meaning, colour) in self.key.items():
            cells = [(t, y) for y, row in enumerate(self.rows.values()) for t, cell in enumerate(row) if cell == letter]
            if cells:
                left, place = zip(*cells, strict=True)
                axes.barh(place, [0.94] * len(cells), 0.9, left=left, color=colour, label=meaning)
        axes.set_yticks(range(len(self.rows)), list(self.rows))
        axes.invert_yaxis()
        axes.set_xlim(0, self.end or max(map(len, self.rows.values())))
        axes.set(title=self.title, xlabel=self.x, ylabel=self.y)


@dataclass(frozen=True)
class Spans:
    """Intervals of time in rows. `rows`: name -> (begin, end, letter); `key`: letter -> (meaning, colour)."""

    title: str
    rows: Mapping[str, Sequence[tuple[float, float, str]]]
    key: Mapping[str, tuple[str, str]]
    x: str
    end: float | None = None  # where the axis ends, so that panels have one scale

    @property
    def height(self) -> float:
        return 0.9 + 0.3 * len(self.rows)

    def draw(self, axes: Axes) -> None:
        for letter, (meaning, colour) in self.key.items():
            label: str | None = meaning
            for y, spans in enumerate(self.rows.values()):
                chosen = [(begin, end - begin) for begin, end, kind in spans if kind == letter]
                if chosen:
                    axes.broken_barh(chosen, (y - 0.4, 0.8), facecolors=colour, label=label, lw=0)
                    label = None
        axes.set_yticks(range(len(self.rows)), list(self.rows))
        axes.invert_yaxis()
        axes.set_xlim(0, self.end)
        axes.set(title=self.title, xlabel=self.x)


@dataclass(frozen=True)
class Areas:
    """GiB over time: stacked areas that are constant from one of `begins` to the next, with the moment of the largest
    sum."""

    title: str
    begins: Sequence[float]  # seconds
    end: float
    areas: Mapping[str, Sequence[float]]
    colours: Mapping[str, str]
    top: float | None = None  # the end of the vertical axis, so that panels have one scale
    height: float = 3.4

    def draw(self, axes: Axes) -> None:
        values = [[*heights, heights[-1]] for heights in self.areas.values()]
        colours = [self.colours[name] for name in self.areas]
        axes.stackplot([*self.begins, self.end], values, step="post", labels=list(self.areas), colors=colours)
        sums = [sum(column) for column in zip(*self.areas.values(), strict=True)]
        peak = max(sums)
        at = self.begins[sums.index(peak)]
        axes.plot([at], [peak], "kv", ms=5)
        side = {"ha": "right", "xytext": (-5, 4)} if at > self.end / 2 else {"ha": "left", "xytext": (5, 4)}
        axes.annotate(f"{peak:.1f}", (at, peak), textcoords="offset points", fontsize=9, fontweight="bold", **side)
        axes.set(title=self.title, xlabel="seconds", ylabel="GiB", xlim=(0, self.end))
        axes.set_ylim(0, self.top or 1.15 * peak)


@dataclass(frozen=True)
class Histogram:
    """Shares of the values between edges: outlines. `marks`: labelled vertical lines."""

    title: str
    x: str
    edges: Sequence[float]
    shares: Mapping[str, Sequence[float]]
    marks: Mapping[str, float] = field(default_factory=dict)
    height: float = 4.5

    def draw(self, axes: Axes) -> None:
        for number, (name, shares) in enumerate(self.shares.items()):
            style = {"color": COLOURS[number], "ls": DASHES[number % len(DASHES)]}
            axes.stairs(shares, self.edges, label=name, lw=1.5, fill=False, **style)
        for name, value in self.marks.items():
            axes.axvline(value, color="black", lw=1, ls="--")
            axes.annotate(
                name, (value, 0.98), xycoords=("data", "axes fraction"), rotation=90, va="top", ha="right", fontsize=7
            )
        axes.set_ylim(top=1.5 * max(map(max, self.shares.values())))  # room for the names of the marks
        axes.set(title=self.title, xlabel=self.x, ylabel="share of values")


@dataclass(frozen=True)
class Blocks:
    """A matrix in blocks. `blocks`: (first row, first column, rows, columns) -> text; `shade`: from 0, pale, to 1."""

    title: str
    blocks: Mapping[tuple[int, int, int, int], str]
    shade: float
    y: str = ""
    x: str = ""
    height: float = 1.5

    def draw(self, axes: Axes) -> None:
        from matplotlib.colors import LinearSegmentedColormap
        from matplotlib.patches import Rectangle

        colour = LinearSegmentedColormap.from_list("shades", [PALE, DARK])(self.shade)
        for (top, left, rows, columns), text in self.blocks.items():
            axes.add_patch(Rectangle((left, top), columns, rows, fc=colour, ec="black", lw=0.8))
            axes.text(
                left + columns / 2, top + rows / 2, text,
                ha="center", va="center", fontsize=7, color="white" if self.shade > 0.5 else "black",
            )  # fmt: skip
        axes.set_xlim(0, max(left + columns for _, left, _, columns in self.blocks))
        axes.set_ylim(max(top + rows for top, _, rows, _ in self.blocks), 0)
        axes.set(title=self.title, ylabel=self.y, xticks=[], yticks=[])
        axes.set_xlabel(self.x, fontsize=8)


Panel = Bars | LinePlot | Cells | Spans | Areas | Histogram | Blocks


def draw(path: Path, panels: Sequence[Panel], widths: Sequence[float] | None = None) -> None:
    """A PNG with a column of panels per entry of `widths`, in inches; None: all panels side by side."""
    from jaxmem.report.figure import figure  # imports jax, which each stop must configure before

    widths = widths or [max(4.5, 9 / len(panels))] * len(panels)
    lines = [panels[start : start + len(widths)] for start in range(0, len(panels), len(widths))]
    heights = [max(panel.height for panel in line) for line in lines]
    with figure(path, sum(widths), sum(heights)) as drawn:
        grid = drawn.subplots(len(lines), len(widths), squeeze=False, height_ratios=heights, width_ratios=widths)
        for axes, panel in zip(grid.flat, panels, strict=False):
            panel.draw(axes)
            axes.tick_params(labelsize=8, which="both")
            if not isinstance(panel, Blocks):
                axes.grid(alpha=0.3, axis="both" if isinstance(panel, LinePlot | Areas) else "x")
            axes.set_title(axes.get_title(), fontsize=10, loc="left" if isinstance(panel, Cells | Spans) else "center")
            if isinstance(panel, Cells | Spans):
                axes.set_title("", loc="center")
            if not isinstance(panel, Areas) or panel is panels[-1]:  # areas of several panels have the same names
                _legend(axes, above=isinstance(panel, Cells | Spans))
        for axes in grid.flat[len(panels) :]:
            axes.set_axis_off()


def _legend(axes: Axes, *, above: bool) -> None:
    """A legend if there are several names; `above`: beside the title, because the panel has no free space."""
    names = axes.get_legend_handles_labels()[1]
    if len(names) < 2:
        return
    if above:
        axes.legend(loc="lower right", bbox_to_anchor=(1, 0.99), ncols=len(names), fontsize=7, frameon=False)
    else:
        axes.legend(fontsize=7)
