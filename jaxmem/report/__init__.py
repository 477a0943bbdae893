"""A run as one HTML page or a figure: its plan, its memory over a step, its training curves.

Everything is drawn from three files of the run directory (plan.json, memory.json, metrics.jsonl), or from a plan.
Nothing is compiled and no device is used.
"""

import json
from pathlib import Path
from typing import Any

from jaxmem.checkpoint.metrics import parse_row
from jaxmem.config import load_config
from jaxmem.errors import UserError
from jaxmem.planning import Plan
from jaxmem.report.figure import draw
from jaxmem.report.page import RunRecord, page


def write_page(plan: Plan, path: str | Path) -> None:
    """Write a plan as an HTML page."""
    Path(path).write_text(page(plan.as_json(), plan.history), encoding="utf-8")


def write_figure(plan: Plan, path: str | Path) -> None:
    """Write a plan's memory over a step as a PNG."""
    draw(plan.as_json(), plan.history, path)


def report_run(run: str | Path, path: str | Path | None = None, png: str | Path | None = None) -> Path:
    """Write a run as a page, by default `RUN/report.html`, and return its path. `png`: the path of a figure to write
    too."""
    run = Path(run)
    plan, memory = (_read(run, name) for name in ("plan.json", "memory.json"))
    if png is not None:
        draw(plan, memory, png)
    config, metrics = run / "config.yaml", run / "metrics.jsonl"
    lines = metrics.read_text(encoding="utf-8", errors="replace").splitlines() if metrics.is_file() else []
    rows = [row for line in lines if (row := parse_row(line)) is not None]
    target = run / "report.html" if path is None else Path(path)
    record = RunRecord(load_config(config).steps, rows, config.read_text(encoding="utf-8"))
    target.write_text(page(plan, memory, record), encoding="utf-8")
    return target


def _read(run: Path, name: str) -> dict[str, Any]:
    try:
        return json.loads((run / name).read_text(encoding="utf-8"))
    except OSError as error:
        what = "no such run directory" if not run.is_dir() else f"{name} is missing, which `jaxmem train` writes"
        raise UserError(f"{run}: {what}; for a config use jaxmem plan CONFIG --html FILE") from error


__all__ = ["draw", "page", "report_run", "write_figure", "write_page"]
