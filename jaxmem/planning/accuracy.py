"""How far published runs are from their planned times, for what `plan` and `fit` print.

`scripts/bench/published.py` writes the ranges; `docs/accuracy.md` shows the runs.
"""

from pathlib import Path

import yaml

from jaxmem.planning.targets import Target

FILE = Path(__file__).with_suffix(".yaml")


def kind_of(target: Target) -> str:
    """The kind of a target, for which published runs are compared."""
    if target.count == 1:
        return "one GPU"
    return "one host" if target.hosts == 1 else "several hosts"


def published_range(target: Target) -> str | None:
    """How published runs on targets of this kind compare with their planned times, as text; None for other devices than
    GPUs."""
    if target.gpu is None:
        return None
    kind = kind_of(target)
    ranges: dict[str, dict[str, float]] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    if (published := ranges.get(kind)) is None:
        return None
    least = _difference(published["least"])
    most = _difference(published["most"])
    return f"{published['runs']} published runs on {kind} took {least} to {most}"


def _difference(factor: float) -> str:
    """A factor as a difference in words.

    >>> _difference(0.97), _difference(1.06)
    ('3 % less', '6 % more')
    """
    return f"{abs(factor - 1):.0%}".replace("%", " %") + (" less" if factor < 1 else " more")
