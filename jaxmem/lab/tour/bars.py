"""Bars of what parts come to, one behind the other: a bar a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def stacked(axes: Axes, rows: Sequence[Mapping[str, Any]], parts: Mapping[str, str], unit: int = 2**30) -> None:
    """The first row at the top; `parts`: a field of the rows in bytes, and what the figure calls it."""
    names, start = [row["name"] for row in rows], [0.0] * len(rows)
    for part, label in parts.items():
        sizes = [row[part] / unit for row in rows]
        axes.barh(names, sizes, left=start, label=label)
        start = [before + size for before, size in zip(start, sizes, strict=True)]
    axes.invert_yaxis()
