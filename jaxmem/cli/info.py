"""Commands that explain: `jaxmem report`, `tour`, `doctor` and `schema`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from jaxmem.cli.options import Json, Png, Run, Target
from jaxmem.cli.start import only_json, show, take_devices


def report(
    run: Run,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="HTML file to write. [default: RUN/report.html]")
    ] = None,
    png: Png = None,
) -> None:
    """Write an HTML page about a run: plan, memory, loss curves."""
    from jaxmem.report import report_run

    print(report_run(run, html, png))


def tour(
    topic: Annotated[
        str | None, typer.Argument(metavar="[TOPIC]", help="Name of a technique. [default: list all]")
    ] = None,
    target: Target = None,
    write: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write a Markdown page and its figure.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Explain a technique with numbers computed on this machine."""
    from jaxmem.lab import tour
    from jaxmem.lab.tour import SIMULATED

    if topic is None:
        listed = tour.list_stops()
        show({"stops": [{"topic": "stops", "rows": listed.rows, "seconds": 0.0}]} if as_json else listed)
        return
    stop = tour.find_stop(topic)
    picture = (write or Path("runs/tour") / topic).with_suffix(".png")
    take_devices(SIMULATED if stop.uses == "simulated" else None, only_compile=stop.uses == "compiler")
    if stop.duration:
        print(f"{topic} takes {stop.duration} on two cores without a GPU.", file=sys.stderr, flush=True)
    with only_json(as_json):
        visit = stop.visit(target)
    from jaxmem.report import figure

    drawn = figure.can_draw() and visit.draw(picture)
    if write:
        write.write_text(visit.markdown(picture if drawn else None), encoding="utf-8")
    if as_json:
        show({"stops": [visit.as_json()]})
        return
    show(visit)
    if drawn:
        show(f"Figure: {picture}")
    elif visit.findings.panels:
        show(f"No figure: {figure.MISSING}")


def doctor(as_json: Json = False) -> None:
    """Check the driver, packages and devices of this machine."""
    from jaxmem.machine import doctor

    with only_json(as_json):
        findings = doctor.examine()
    show(findings if as_json else doctor.table(findings))


def schema() -> None:
    """Print the JSON schema of a config."""
    from jaxmem.config import json_schema

    show(json_schema())
