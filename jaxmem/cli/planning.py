"""`jaxmem plan` and `jaxmem fit`."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxmem.cli import options
from jaxmem.cli.start import fit_command, only_json, show, take_devices
from jaxmem.errors import UserError
from jaxmem.machine import devices
from jaxmem.machine.terminal import say, say_text
from jaxmem.typing import JsonDict

if TYPE_CHECKING:
    from jaxmem.config import Config


def plan(
    source: options.ModelOrConfig = None,
    overrides: options.Overrides = None,
    target: options.Target = None,
    method: options.MethodName = None,
    sequence_length: options.SequenceLength = None,
    batch: options.BatchSize = None,
    write: options.ConfigOutput = None,
    reserve: options.Reserve = None,
    simulate: options.Simulate = None,
    html: options.Html = None,
    png: options.Png = None,
    as_json: options.Json = False,
) -> None:
    """Plan the memory of each device before a run.

    Plan for the devices of this machine or, with --target, for others. If it does not fit, the exit code is 3.
    """
    if target == "list":
        from jaxmem.machine.gpus import GPUS
        from jaxmem.planning.table import target_table

        show({"targets": [dataclasses.asdict(gpu) for gpu in GPUS.values()]} if as_json else target_table())
        return
    if target and simulate:
        raise UserError(f"--simulate {simulate} and --target {target} both select devices; use one of them")
    _check_files({"--write": write, "--html": html, "--png": png})
    cfg = _config(source, overrides, target, simulate, method=method, sequence_length=sequence_length, batch=batch)
    from jaxmem import report
    from jaxmem.planning.result import plan

    with only_json(as_json), _status() as progress:
        planned = plan(cfg, target, reserve_gib=reserve, progress=progress)
        if html:
            report.write_page(planned, html)
        if png:
            report.write_figure(planned, png)
    if write:
        from jaxmem.config.load import save_settings

        save_settings(cfg, write)
    show(planned.as_json() if as_json else planned.table())
    if write:
        say(f"wrote {write}" + (f"; next: {_train_command(write, cfg)}" if planned.fits else ""), file=sys.stderr)
    if planned.target.gpu and not devices.has_nvidia_gpu():
        _note_once(
            "note: other jax scripts in this environment print a traceback (cuDNN not found) and continue on the CPU;"
            " to avoid it, set JAX_PLATFORMS=cpu"
        )
    if not planned.fits:
        given = {"overrides": overrides or [], "reserve": reserve, "sequence_length": sequence_length, "batch": batch}
        command = fit_command(source or "", given, method=method, target=target, simulate=simulate)
        _progress(f"{cfg.name} does not fit; to search for settings that fit:")
        say(f"  {command}", file=sys.stderr)
        raise typer.Exit(3)


def fit(
    source: options.ModelOrConfig = None,
    overrides: options.Overrides = None,
    target: options.Target = None,
    method: options.MethodName = None,
    sequence_length: options.SequenceLength = None,
    batch: options.BatchSize = None,
    allow: Annotated[
        str | None,
        typer.Option(
            metavar="WORDS",
            help="Groups of settings that may change, separated by commas: mesh,remat,batch,offload,...",
        ),
    ] = None,
    maximize: Annotated[
        str | None, typer.Option(metavar="KEY", help="Find the largest value of KEY that fits, e.g. model.layers.")
    ] = None,
    write: options.ConfigOutput = None,
    reserve: options.Reserve = None,
    compiles: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Compile at most N configs; by default 12.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Find the fastest settings that fit in memory.

    For a model, compare all training methods, or those of --method full,lora. If nothing fits, the exit code is 3.
    """
    sizes: JsonDict = {"sequence_length": sequence_length, "batch": batch}
    _check_files({"--write": write})
    first, *others = (name.strip() for name in method.split(",")) if method else [None]
    cfg = _config(source, overrides, target, None, method=first, **sizes)
    if target is not None:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")  # no local device is used
    from jaxmem.config.methods import is_model
    from jaxmem.search import comparison, fit, largest

    limits: JsonDict = {"reserve_gib": reserve}
    if allow is not None:
        limits["allow"] = [word.strip() for word in allow.split(",") if word.strip()]
    assert source is not None
    compares = others or (method is None and is_model(source) and not maximize)
    for option, value in (("--maximize", maximize), ("--allow", allow), ("--compiles", compiles)):
        if compares and value:
            raise UserError(f"{option} {value} supports a single method only; use --method NAME")
    if maximize and compiles:
        raise UserError(f"--compiles {compiles} has no effect with --maximize; remove --compiles")
    result: Any
    with only_json(as_json):
        if maximize:
            result = largest.maximize(cfg, maximize, target, **limits)
        else:
            given = {"overrides": overrides or [], "method": method, **sizes}
            result = fit.fit(source, target, compiles=compiles, progress=_progress, **limits, **given)
        if result.best and write:
            result.write(write)
    show(result.as_json() if as_json else result.table())
    if result.best and write:
        compared = result.best if isinstance(result, comparison.Comparison) else None
        of_method = f", method {compared.name}" if compared else ""
        say(f"wrote {write}{of_method}; next: {_train_command(write, result.best.cfg)}", file=sys.stderr)
    raise typer.Exit(0 if result.best else 3)


def _train_command(file: Path, cfg: Config) -> str:
    """The command that trains a written config. An adapter needs the weights and data that a preset does not have."""
    has_weights = cfg.adapter.kind == "none" or cfg.adapter.base_run or getattr(cfg.model, "hf", None)
    return f"jaxmem train {file}" + ("" if has_weights else " model='{hf: DIR}' data.source=chat data.path=FILE")


def _check_files(files: dict[str, Path | None]) -> None:
    """Refuses a directory as an output file before anything is compiled."""
    for option, path in files.items():
        if path is not None and path.is_dir():
            raise UserError(f"{option} {path} is a directory; use the path of a file")


def _config(
    source: str | None, overrides: list[str] | None, target: str | None, simulate: int | None, **options: Any
) -> Config:
    """The config, which is checked before jax is imported. Also chooses its devices."""
    from jaxmem.config.methods import run_config
    from jaxmem.config.presets import preset_of

    if source is None:
        raise UserError(
            "CONFIG_OR_MODEL is missing; use a YAML file such as configs/demo.yaml, a preset such as llama3-8b, or a"
            " Hugging Face model; `jaxmem plan --target list` prints the devices"
        )
    if target is None:
        count = simulate or devices.visible_count(len(devices.nvidia_gpus())) or 1
    else:  # the target is checked when it is used
        count = math.prod(map(int, re.findall(r"\d+", target.partition(":")[2]))) or 1
    cfg = run_config(source, overrides or (), devices=count, **options)
    preset = preset_of(source)
    if preset not in (None, source) and not Path(source).exists():
        _progress(f"{source}: no such directory; planning the preset {preset} with random weights")
    take_devices(simulate, only_compile=True)
    return cfg


def _note_once(text: str) -> None:
    """Prints a line after the first plan for GPUs that are not installed, and records that it was printed."""
    from jaxmem.search.worker import cache_directory

    record = cache_directory().with_name("printed-note")
    if record.exists():
        return
    _progress(text)
    with contextlib.suppress(OSError):  # a read-only cache: the next plan prints it again
        record.parent.mkdir(parents=True, exist_ok=True)
        record.touch()


@contextlib.contextmanager
def _status() -> Iterator[Callable[[str], None]]:
    """A function that shows what is being done: in a terminal a line that changes, otherwise a line for each text."""
    if not sys.stderr.isatty():
        yield _progress
        return
    from jaxmem.machine.console import Console

    # The file descriptor 2 is redirected while XLA compiles; the line continues to move.
    with open(os.dup(2), "w", encoding="utf-8") as terminal:  # noqa: PTH123, a descriptor is not a path
        console = Console(file=terminal)
        with console.status("reading the config ...", spinner="line") as status:
            yield status.update


def _progress(line: str) -> None:
    say_text(line, file=sys.stderr)
