"""A run as one HTML page or a figure: its plan, its memory over a step, its training curves.

Everything is drawn from three files of the run directory (plan.json, memory.json, metrics.jsonl), or from a plan.
Nothing is compiled and no device is used.
"""

import json
from pathlib import Path

from jaxmem.checkpoint.metrics import read_rows
from jaxmem.config.load import load_config
from jaxmem.errors import UserError
from jaxmem.machine.files import write_file
from jaxmem.planning.result import Plan
from jaxmem.report.figure import draw
from jaxmem.report.page import RunRecord, page
from jaxmem.typing import JsonDict


def write_page(plan: Plan, path: str | Path) -> None:
    """Write a plan as an HTML page."""
    write_file(Path(path), page(plan.as_json(), plan.history))


def write_figure(plan: Plan, path: str | Path) -> None:
    """Write a plan's memory over a step as a PNG."""
    draw(plan.as_json(), plan.history, path)


def report_run(run: str | Path, path: str | Path | None = None, png: str | Path | None = None) -> Path:
    """Write a run as a page, by default `RUN/report.html`, and return its path. `png`: the path of a figure to write
    too."""
    run = Path(run)
    plan, memory = (_read(run, name) for name in ("plan.json", "memory.json"))
    config = run / "config.yaml"
    rows = read_rows(run / "metrics.jsonl")
    target = run / "report.html" if path is None else Path(path)
    record = RunRecord(load_config(config).steps, rows, config.read_text(encoding="utf-8"))
    try:
        if png is not None:
            draw(plan, memory, png)
        text = page(plan, memory, record)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise _damaged(run, "plan.json or memory.json", error) from error
    write_file(target, text)
    return target


def _read(run: Path, name: str) -> JsonDict:
    try:
        content = json.loads((run / name).read_bytes())
    except (ValueError, RecursionError) as error:
        raise _damaged(run, name, error) from error
    except OSError as error:
        what = "no such run directory" if not run.is_dir() else f"{name} is missing, which `jaxmem train` writes"
        raise UserError(f"{run}: {what}; for a config use jaxmem plan CONFIG --html FILE") from error
    if not isinstance(content, dict):
        raise _damaged(run, name, "it is not a JSON object")
    return content


def _damaged(run: Path, names: str, reason: object) -> UserError:
    use = f"run jaxmem plan {run / 'config.yaml'} --html FILE"
    return UserError(f"{run}: {names}: damaged: {reason}; {use}")
