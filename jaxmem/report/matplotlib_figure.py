"""Figures as PNG files. Only this room imports matplotlib, which is optional."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from jaxmem.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MISSING = "figures need matplotlib: pip install 'jaxmem[figures]'"


def can_draw() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


@contextmanager
def figure(path: str | Path, width: float = 8, height: float = 5) -> Iterator[Figure]:
    """A figure of this size in inches to draw on; it is written on exit."""
    if not can_draw():
        raise UserError(f"{path}: {MISSING}")
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(width, height), layout="constrained")
    yield drawn
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    drawn.savefig(path, format="png", dpi=150)
