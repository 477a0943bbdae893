"""Charts as inline SVG that scales to any width, with labels in HTML that do not scale.

Each chart follows the pointer, touch and arrow keys: the readout at the cursor is written into elements with
`data-out`; without a cursor or without JavaScript they show the default readout. matplotlib's SVG is not used here: its
labels scale with the width, it has no readouts, and every run would need matplotlib.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

HEIGHT = 10_000  # of a chart, in SVG units
WIDTH = 10_000
POINTS = 600  # of a line, at most
DASH = 0.03  # of the width: a line of a single point


@dataclass(frozen=True)
class Readout:
    """What a chart shows at the cursor: one text for each `data-out`."""

    begin: float  # share of the width from which it is shown
    at: float  # where the cursor is drawn
    texts: Sequence[str]


def stacked(begins: Sequence[float], layers: Mapping[str, Sequence[float]], top: float) -> str:
    """Stacked areas, each constant from one of `begins` (shares of the width) to the next. `layers`: heights by colour,
    relative to `top`, the height of the chart."""
    edges = [*begins, 1.0]
    below = [0.0] * len(begins)
    paths = []
    for colour, heights in layers.items():
        above = [low + height for low, height in zip(below, heights, strict=True)]
        if any(heights):
            outline = [*_steps(edges, above, top), *reversed(_steps(edges, below, top))]
            paths.append(f'<path fill="{colour}" d="M{" ".join(f"{x},{y}" for x, y in outline)}Z"/>')
        below = above
    return _svg("".join(paths))


def lines(points: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Lines by colour, coordinates as shares of the chart. A single point is a short dash."""
    marked = {
        colour: line if len(line) > 1 else [(max(x - DASH, 0.0), y) for x, y in line] + [*line]
        for colour, line in points.items()
    }
    drawn = "".join(
        f'<polyline stroke="{colour}" points="{" ".join(f"{_x(x)},{_y(y, 1.0)}" for x, y in line)}"/>'
        for colour, line in marked.items()
    )
    return _svg(drawn)


def chart(body: str, marks: str, readouts: Sequence[Readout], default: Readout, *, label: str, outs: str) -> str:
    """A plot and its readouts: `outs` has an element with `data-out` for each text."""
    script = {
        "begin": [round(one.begin, 5) for one in readouts],
        "at": [round(one.at, 5) for one in readouts],
        "texts": [list(one.texts) for one in readouts],
        "rest": list(default.texts),
    }
    data = json.dumps(script, separators=(",", ":")).replace("<", "\\u003c")
    return (
        f'<div class="chart"><div class="outs" aria-live="polite">{outs}</div>'
        f'<div class="plot" tabindex="0" role="img" aria-label="{escape(label)}">'
        f'{body}{marks}<i class="cursor"></i></div><script type="application/json">{data}</script></div>'
    )


def ticks(top: float, unit: float, suffix: str, count: int = 5) -> str:
    """Labels and grid lines at round heights of a chart of height `top`, in multiples of `unit`."""
    step = round_step(top / unit / count)
    values = [step * n for n in range(math.floor(top / unit / step + 1e-9) + 1)]
    return "".join(
        f'<span class="tick" style="bottom:{100 * value * unit / top:.3f}%">'
        f"<b>{value:g}{suffix if value else ''}</b></span>"
        for value in values
    )


def round_step(least: float) -> float:
    """The smallest of 1, 2, 5, 10, ... that is at least as large.

    >>> [round_step(x) for x in (0.3, 4, 6, 70)]
    [0.5, 5, 10, 100]
    """
    power = 10.0 ** math.floor(math.log10(least))
    step = next(factor for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9)) * power
    return int(step) if step >= 1 else step


def thinned(points: Sequence[tuple[float, float]], most: int = POINTS) -> list[tuple[float, float]]:
    """Fewer points that look the same: the first, the lowest, the highest and the last of each interval."""
    if len(points) <= most:
        return list(points)
    size = math.ceil(len(points) / (most // 4))
    found: list[tuple[float, float]] = []
    for start in range(0, len(points), size):
        part = points[start : start + size]
        low, high = min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])
        found += sorted({part[0], low, high, part[-1]})
    return found


def _steps(edges: Sequence[float], heights: Sequence[float], top: float) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for begin, end, height in zip(edges, edges[1:], heights, strict=False):
        y = _y(height, top)
        if found and found[-1][1] == y:
            found[-1] = (_x(end), y)
        else:
            found += [(_x(begin), y), (_x(end), y)]
    return found


def _x(share: float) -> str:
    return f"{WIDTH * share:.0f}"


def _y(height: float, top: float) -> str:
    return f"{HEIGHT * (1 - height / top):.1f}".removesuffix(".0")


def _svg(shapes: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" aria-hidden="true">{shapes}</svg>'
