"""`jaxmem train`, and the commands around it: `launch`, `tokenize`, `report`, `doctor` and `schema`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from jaxmem.cli.options import ConfigFile, Json, Overrides, Png, Run, Simulate
from jaxmem.cli.start import fit_command, is_first_process, joined, load, only_json, show
from jaxmem.errors import one_line
from jaxmem.machine.terminal import say
from jaxmem.training.signals import requeued_before_training


def train(config: ConfigFile, overrides: Overrides = None, simulate: Simulate = None) -> None:
    """Train a model, or resume its run."""
    with requeued_before_training():
        cfg = load(config, overrides, simulate)
        with joined(cfg):
            from jaxmem.training.memory_check import DoesNotFitError
            from jaxmem.training.run import run

            try:
                done = run(cfg)
            except DoesNotFitError as error:
                file = config / "config.yaml" if config.is_dir() else config
                command = fit_command(str(file), {"overrides": overrides or []}, simulate=simulate)
                raise DoesNotFitError(str(error).replace("jaxmem fit CONFIG", command)) from error
            if is_first_process() and done.compiled:
                _write_report(done.directory)
    raise typer.Exit(done.exit_code)


def _write_report(directory: Path) -> None:
    """Writes the report of a run that is saved: an error is a warning, so that the exit code is that of the run."""
    from jaxmem.report import report_run

    try:
        report_run(directory)
    except Exception as error:  # noqa: BLE001, e.g. a full disk, or a damaged file
        say(f"warning: the run is saved, but its report is not written: {one_line(error)}", file=sys.stderr)


def launch(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND", help="The command that each process runs.")],
    processes: Annotated[int, typer.Option("-n", metavar="P", min=1, help="Number of processes.")],
    devices: Annotated[int | None, typer.Option(metavar="D", min=1, help="Simulated CPU devices per process.")] = None,
    restarts: Annotated[
        int, typer.Option(metavar="R", min=0, help="If a process dies, restart in fewer processes, at most R times.")
    ] = 0,
) -> None:
    """Run a command in several processes on this host.

    With Slurm, MPI or Kubernetes, run the command without `jaxmem launch`.
    """
    from jaxmem.distributed.launch import launch

    raise typer.Exit(launch(command, processes, devices, restarts))


def tokenize(
    config: ConfigFile,
    output: Annotated[Path, typer.Option(metavar="DIR", help="The directory of the token cache to write.")],
    overrides: Overrides = None,
) -> None:
    """Tokenize the data of a config and store the tokens."""
    cfg = load(config, overrides, None)
    from rich.progress import Progress

    from jaxmem.data.cache import tokenize
    from jaxmem.machine.console import Console

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("records")
        written = tokenize(cfg, output, lambda done, total: progress.update(task, completed=done, total=total))
    say(f"{output}: {written['tokens']:,} tokens from {written['records']:,} records")
    say(f"train on it with: data.source=tokens data.path={output}")


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
