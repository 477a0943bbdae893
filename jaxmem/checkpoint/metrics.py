"""The rows of `metrics.jsonl` of a run, which may have been damaged or edited since they were logged."""

import json
import math
from pathlib import Path

from jaxmem.typing import JsonDict, JsonView

MAX_METRIC = 1e300  # beyond it a value is damaged, or cannot be plotted


def finite_or_null(values: JsonView) -> JsonDict:
    """Numbers for JSON, which has no NaN and no infinity."""
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def read_rows(file: Path) -> list[JsonDict]:
    """The rows of a file; none if it does not exist."""
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines() if file.is_file() else []
    return [row for line in lines if (row := parse_row(line)) is not None]


def parse_row(line: str) -> JsonDict | None:
    """A row: its step, and a number or null for each metric; None for any other line, such as an incomplete last
    line."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or type(row.get("step")) is not int:
        return None
    is_row = all(value is None or (type(value) in (int, float) and abs(value) < MAX_METRIC) for value in row.values())
    return row if is_row else None
