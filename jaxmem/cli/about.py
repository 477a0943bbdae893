"""What there is to know: `jaxmem report`, `tour`, `doctor` and `schema`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from jaxmem.cli.options import Json, Run
from jaxmem.cli.printing import only_json, show
from jaxmem.cli.starting import take_devices


def report(
    run: Run,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="By default RUN/report.html", show_default=False)
    ] = None,
    png: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Memory over a step, as a figure.", show_default=False)
    ] = None,
) -> None:
    """One HTML page of a run: its plan, its memory over a step, its curves."""
    from jaxmem.report import report_run

    print(report_run(run, html, png))


def tour(
    topic: Annotated[str | None, typer.Argument(metavar="[TOPIC]", help="None: what there is.")] = None,
    target: Annotated[
        str | None, typer.Option(metavar="T", help="Compile for it: h100-80gb, my-gpu.yaml", show_default=False)
    ] = None,
    write: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also as Markdown, its figure beside it.", show_default=False)
    ] = None,
    as_json: Json = False,
) -> None:
    """Each technique, with its number."""
    from jaxmem.lab import tour
    from jaxmem.report import matplotlib_figure

    if topic is None:
        listed = tour.stops()
        show({"stops": [{"topic": "stops", "rows": listed.rows, "seconds": 0.0}]} if as_json else listed)
        return
    stop = tour.stop(topic)
    picture = (write or Path("runs/tour") / topic).with_suffix(".png")
    take_devices(tour.SIMULATED if stop.uses == "simulated" else None, only_compile=stop.uses == "compiler")
    if stop.takes:
        print(f"{topic} takes {stop.takes} on two cores without a GPU.", file=sys.stderr, flush=True)
    with only_json(as_json):
        visit = stop.visit(target)
    drawn = matplotlib_figure.can_draw() and visit.draw(picture)
    if write:
        write.write_text(visit.markdown(picture if drawn else None), encoding="utf-8")
    if as_json:
        show({"stops": [visit.as_json()]})
        return
    show(visit)
    if drawn:
        show(f"Figure: {picture}")
    elif visit.found.draw:
        show(f"No figure: {matplotlib_figure.MISSING}")


def doctor(as_json: Json = False) -> None:
    """Driver, wheels, memory in use, what works here."""
    from jaxmem.machine import doctor

    with only_json(as_json):
        findings = doctor.examine()
    show(findings if as_json else doctor.table(findings))


def schema() -> None:
    """The config's JSON schema, for editors."""
    from jaxmem.config import json_schema

    show(json_schema())
