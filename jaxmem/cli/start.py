"""The beginning of a command (config, devices, the other processes of the run; jax starts after it) and its standard
output: one JSON object for programs, tables for people."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from jaxmem.errors import UserError
from jaxmem.machine import devices
from jaxmem.machine.terminal import say
from jaxmem.typing import JsonDict, JsonView

if TYPE_CHECKING:
    from rich.console import RenderableType

    from jaxmem.config import Config

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tabs and line breaks


def fit_command(
    source: str, settings: JsonView, method: str | None = None, target: str | None = None, simulate: int | None = None
) -> str:
    """The command that searches for settings with which a run fits. `settings`: as in `comparison.command_line`."""
    from jaxmem.search.comparison import command_line

    options = {"--method": method, "--target": target or (f"cpu:{simulate}" if simulate else None)}
    words = [word for name, value in options.items() if value for word in (name, value)]
    return shlex.join(["jaxmem", "fit", *command_line(source, settings), *words])


def load(config: Path, overrides: list[str] | None, simulate: int | None) -> Config:
    """The checked config of a file or of a run's directory. Also chooses its devices, before jax is imported."""
    from jaxmem.config.hub import is_gguf
    from jaxmem.config.load import load_config
    from jaxmem.config.presets import preset_of

    is_run = (config / "config.yaml").is_file()
    place = config.resolve()
    if is_run:
        output = os.path.relpath(place.parent)
        overrides = [f"output={json.dumps(output)}", f"name={json.dumps(place.name)}", *(overrides or ())]
        config /= "config.yaml"
    elif (config / "config.json").is_file() or is_gguf(config) or (not config.exists() and preset_of(str(config))):
        write = f"jaxmem plan {config} --method qlora --write run.yaml"
        raise UserError(f"{config} is a model, not a config; write a config first, such as: {write}")
    elif config.is_dir():
        raise UserError(f"{config} contains no config.yaml; use a YAML file or the directory of a run")
    cfg = load_config(config, overrides or [], is_run=is_run)
    if is_run and cfg.checkpoint.path is not None:
        before = load_config(config, is_run=True).name
        if cfg.name == place.name != before:
            checkpoints = f"its checkpoints in {cfg.checkpoint.path}"
            raise UserError(f"{place} was renamed from {before}, the name of {checkpoints}; name it {before} again")
    take_devices(simulate)
    return cfg


def take_devices(simulate: int | None, *, only_compile: bool = False) -> None:
    """Chooses this machine's devices, or `simulate` CPU devices, before jax starts."""
    if simulate is None:
        devices.use_cpu_without_gpu(only_compile=only_compile)
    else:
        devices.simulate(simulate)


@contextlib.contextmanager
def joined(cfg: Config | None) -> Iterator[None]:
    """A context that joins the processes that were started together with this one, if any, before jax starts."""
    from jaxmem.config import Cluster
    from jaxmem.distributed import join

    cluster = cfg.cluster if cfg else Cluster()
    with join.joined(cluster.heartbeat_timeout, cluster.start_timeout):
        yield


def run_config(run: Path) -> Config | None:
    """The config of a run; None if there is no run, which the code that opens it reports."""
    from jaxmem.config.load import load_config

    file = run / "config.yaml"
    return load_config(file) if file.is_file() else None


def is_first_process() -> bool:
    """Whether this process is the only one or the first of several; only the first prints."""
    import jax

    return jax.process_index() == 0


def print_text(text: str) -> None:
    """Prints a part of a text at once, without a line break. On a terminal, control characters are escaped, because the
    tokens of a model's file can be commands for the terminal."""
    if is_first_process():
        escaped = CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text) if sys.stdout.isatty() else text
        print(escaped, end="", flush=True)  # noqa: T201


def only_json(as_json: bool) -> contextlib.AbstractContextManager[object]:
    """A context for a command with --json: everything that the library prints goes to standard error."""
    return contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext()


def show(result: RenderableType | JsonDict) -> None:
    """Prints a dict as JSON, and anything else through rich. A command to paste may be longer than a line."""
    if isinstance(result, dict):
        say(json.dumps(result, indent=2))
        return
    from jaxmem.machine.console import Console

    Console().print(result, markup=not isinstance(result, str), crop=False)
