"""Charts of the page: shapes as the points of an SVG that scales to any width, ticks, and readouts at the cursor.

Labels are HTML, which does not scale. Each chart follows the pointer, touch and arrow keys (`page.js`); without a
cursor or without JavaScript it shows the default readout. matplotlib's SVG is not used here: its labels scale with the
width, it has no readouts, and every run would need matplotlib.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxmem.planning.history import BANDS, PASSES

WIDTH = HEIGHT = 10_000  # SVG units of a chart
MAX_POINTS = 600  # largest number of points of a line
DASH_LENGTH = 0.03  # length of a line of a single point, as a share of the width
# The colours of memory bands, distinct also with colour blindness (Okabe and Ito, "Color Universal Design", 2008).
_OKABE_ITO = ("#0072b2", "#56b4e9", "#9aa0a6", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#e8d84a")
COLOURS = dict(zip(BANDS, _OKABE_ITO, strict=True))
COLOURS["activations in passing"] = COLOURS["other activations"]  # its name in runs of version 0.1.0
SHADES = dict(zip(PASSES, ("#64798c", "#3d5063", "#4f6477", "#7a8c9c"), strict=True))


@dataclass(frozen=True)
class Readout:
    """The texts that a chart shows at the cursor."""

    begin: float  # share of the width from which the readout is shown
    at: float  # share of the width at which the cursor is drawn
    texts: Sequence[str]


@dataclass(frozen=True)
class Chart:
    label: str
    areas: Mapping[str, str]  # points of stacked areas, by colour
    lines: Mapping[str, str]  # points of lines, by colour
    ticks: Sequence[tuple[float, str]]  # height in percent, and label
    entries: Sequence[tuple[str | None, str]]  # colour and name of each series of the readouts
    readouts: Sequence[Readout]
    default: Readout

    @property
    def heads(self) -> Sequence[str]:
        """The first texts of the default readout, which belong to no series."""
        return self.default.texts[: -len(self.entries)]

    @property
    def script(self) -> str:
        """The readouts as JSON for `page.js`."""
        data = {
            "begin": [round(readout.begin, 5) for readout in self.readouts],
            "at": [round(readout.at, 5) for readout in self.readouts],
            "texts": [list(readout.texts) for readout in self.readouts],
            "rest": list(self.default.texts),
        }
        return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def stacked(begins: Sequence[float], layers: Mapping[str, Sequence[float]], top: float) -> dict[str, str]:
    """Stacked areas, each constant from one of `begins` (shares of the width) to the next. `layers`: heights by colour,
    relative to `top`, the height of the chart."""
    edges = [*begins, 1.0]
    below = [0.0] * len(begins)
    areas = {}
    for colour, heights in layers.items():
        above = [low + height for low, height in zip(below, heights, strict=True)]
        if any(heights):
            areas[colour] = _joined([*_steps(edges, above, top), *reversed(_steps(edges, below, top))])
        below = above
    return areas


def polyline(points: Sequence[tuple[float, float]]) -> str:
    """A line through points, which are shares of the chart. A single point is a short dash."""
    if len(points) == 1:
        [(x, y)] = points
        points = [(max(x - DASH_LENGTH, 0.0), y), (x, y)]
    return _joined(points)


def ticks(top: float, unit: float, suffix: str, count: int = 5) -> list[tuple[float, str]]:
    """Grid lines at round heights of a chart of height `top`, in multiples of `unit`: percent of the height, label."""
    step = round_step(top / unit / count)
    values = [step * n for n in range(math.floor(top / unit / step + 1e-9) + 1)]
    return [(100 * value * unit / top, f"{value:g}{suffix if value else ''}") for value in values]


def round_step(least: float) -> float:
    """The smallest of ..., 0.5, 1, 2, 5, 10, ... that is at least `least`.

    >>> [round_step(x) for x in (0.3, 4, 6, 70)]
    [0.5, 5, 10, 100]
    """
    power = 10.0 ** math.floor(math.log10(least))
    step = next(factor for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9)) * power
    return int(step) if step >= 1 else step


def thinned(points: Sequence[tuple[float, float]], most: int = MAX_POINTS) -> list[tuple[float, float]]:
    """Fewer points with the same appearance: the first, the lowest, the highest and the last of each interval."""
    if len(points) <= most:
        return list(points)
    size = math.ceil(len(points) / (most // 4))
    points_kept: list[tuple[float, float]] = []
    for start in range(0, len(points), size):
        part = points[start : start + size]
        low = min(part, key=lambda point: point[1])
        high = max(part, key=lambda point: point[1])
        points_kept += sorted({part[0], low, high, part[-1]})
    return points_kept


def _steps(edges: Sequence[float], heights: Sequence[float], top: float) -> list[tuple[float, float]]:
    """The corners of a step function; equal neighbours are merged."""
    corners: list[tuple[float, float]] = []
    for begin, end, height in zip(edges, edges[1:], heights, strict=False):
        y = round(height / top, 5)
        if corners and corners[-1][1] == y:
            corners[-1] = (end, y)
        else:
            corners += [(begin, y), (end, y)]
    return corners


def _joined(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{WIDTH * x:.0f},{HEIGHT * (1 - y):.1f}".removesuffix(".0") for x, y in points)
