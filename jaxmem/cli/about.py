"""What there is to know: `jaxmem report`, `tour`, `doctor` and `schema`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from jaxmem import devices
from jaxmem.cli.options import Json, Run
from jaxmem.cli.printing import only_json, show


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
    write: Annotated[Path | None, typer.Option(metavar="FILE", help="Also as Markdown.", show_default=False)] = None,
    as_json: Json = False,
) -> None:
    """Each technique, with its number."""
    from jaxmem import tour

    trains = topic in tour.STOPS and tour.STOPS[topic].trains
    devices.stay_on_cpu_without_gpu(only_compile=not trains)
    with only_json(as_json):
        stops = tour.visit(topic, target)
    if write:
        write.write_text("\n\n".join(stop.markdown() for stop in stops) + "\n")
    if as_json:
        show({"stops": [stop.as_json() for stop in stops]})
    else:
        for stop in stops:
            show(stop.table())
            if stop.note:
                show(stop.note)


def doctor(as_json: Json = False) -> None:
    """Driver, wheels, memory in use, what works here."""
    from jaxmem import doctor

    with only_json(as_json):
        findings = doctor.examine()
    show(findings if as_json else doctor.table(findings))


def schema() -> None:
    """The config's JSON schema, for editors."""
    from jaxmem.config import json_schema

    show(json_schema())
