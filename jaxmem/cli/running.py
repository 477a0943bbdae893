"""Training: `jaxmem train`, and `jaxmem launch` for several processes of one host."""

from __future__ import annotations

from typing import Annotated

import typer

from jaxmem.cli.options import ConfigFile, Overrides, Simulate
from jaxmem.cli.printing import is_first
from jaxmem.cli.starting import joined, load


def train(config: ConfigFile, overrides: Overrides = None, simulate: Simulate = None) -> None:
    """Train, or go on where the run stopped."""
    cfg = load(config, overrides, simulate)
    with joined(cfg):
        from jaxmem.report import report_run
        from jaxmem.training.run import run

        done = run(cfg)
        if is_first():
            report_run(done.directory)
    raise typer.Exit(done.exit_code)


def launch(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND", help="What each of them runs.")],
    processes: Annotated[int, typer.Option("-n", metavar="P", min=1, help="How many.")],
    devices: Annotated[
        int | None, typer.Option(metavar="D", min=1, help="Simulated CPU devices of each.", show_default=False)
    ] = None,
) -> None:
    """P processes of one command on this host, as one program (Slurm, MPI and Kubernetes need no launcher)."""
    from jaxmem.distributed.launch import launch

    raise typer.Exit(launch(command, processes, devices))
