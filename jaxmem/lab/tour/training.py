"""Small runs of `jaxmem train` for their results alone, on one device each; nothing is printed or left behind.

A run takes seconds and most of them are compilation on one core, so on a CPU there are as many processes as cores. On a
GPU one process does all.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from jaxmem.config import load_config
from jaxmem.errors import UserError
from jaxmem.machine import devices

# A language model of bytes that trains in seconds.
DECODER: Mapping[str, Any] = {
    "family": "decoder", "vocab": 257, "layers": 2, "embed": 64, "mlp": 192, "heads": 4, "kv_heads": 4, "head_dim": 16,
}  # fmt: skip
TEXT = {"source": "stdlib", "sequence_length": 128}


class SmallRun(NamedTuple):
    """A config and its overrides; the run is kept in `directory` if there is one."""

    config: Mapping[str, Any]
    overrides: Sequence[str] = ()
    directory: str | None = None


class Outcome(NamedTuple):
    """The run's plan as `jaxmem plan --json` has it, and its means on held-out data."""

    plan: dict[str, Any]
    held_out: dict[str, float]


def train_all(runs: Mapping[str, SmallRun]) -> dict[str, Outcome]:
    context = multiprocessing.get_context("spawn")  # jax does not survive a fork
    processes = min(len(runs), _processes())
    with ProcessPoolExecutor(processes, context, initializer=devices.use_cpu_without_gpu) as pool:
        try:
            return dict(zip(runs, pool.map(_train, runs.values()), strict=True))
        except Exception as error:
            raise UserError(f"a run of the tour failed: {error}") from error


def train_each(
    config: Mapping[str, Any], steps: int | None, overrides: Mapping[str, Sequence[str]]
) -> dict[str, Outcome]:
    """The same config under several overrides. `steps`: in place of the config's own."""
    config = {**config, "train": {"steps": steps}} if steps else config
    return train_all({name: SmallRun(config, own) for name, own in overrides.items()})


def _processes() -> int:
    if devices.has_nvidia_gpu():
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _train(run: SmallRun) -> Outcome:
    steps = run.config["train"]["steps"]
    often = {**run.config["train"], "evaluate_every": steps, "log_every": steps}
    with tempfile.TemporaryDirectory() as temporary, contextlib.redirect_stdout(io.StringIO()):
        place = Path(run.directory or Path(temporary) / "run")
        own = {"name": place.name, "output": str(place.parent), "train": often}
        cfg = load_config({**run.config, **own}, run.overrides)  # before jax starts, which takes longer
        import jax

        from jaxmem.training.run import run as train

        result = train(cfg, jax.devices()[:1])
        return Outcome(result.plan.as_json(), dict(result.held_out))
