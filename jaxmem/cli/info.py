"""Commands that explain: `jaxmem report`, `doctor` and `schema`."""

from pathlib import Path
from typing import Annotated

import typer

from jaxmem.cli.options import Json, Png, Run
from jaxmem.cli.start import only_json, show
from jaxmem.machine.terminal import say


def report(
    run: Run,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="HTML file. [default: RUN/report.html]")] = None,
    png: Png = None,
) -> None:
    """Write an HTML page about a run: plan, memory, loss curves."""
    from jaxmem.report import report_run

    say(report_run(run, html, png))


def doctor(as_json: Json = False) -> None:
    """Check the driver, packages and devices of this machine."""
    from jaxmem.machine import doctor

    with only_json(as_json):
        findings = doctor.examine()
    show(findings if as_json else doctor.table(findings))


def schema() -> None:
    """Print the JSON schema of a config."""
    from jaxmem.config.schema import json_schema

    show(json_schema())
