"""Small runs of `jaxmem train` for their results alone, on one device each; nothing is printed or left behind.

A run takes seconds and most of them are compilation on one core, so on a CPU there are as many processes as cores. On a
GPU one process does all.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
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
    count = min(len(runs), _processes())
    shares = [dict(list(runs.items())[first::count]) for first in range(count)]
    with ThreadPoolExecutor(count) as pool:
        done = dict(one for share in pool.map(train_in_process, shares) for one in share.items())
    return {name: done[name] for name in runs}


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


def train_in_process(runs: Mapping[str, SmallRun]) -> dict[str, Outcome]:
    """One run after the other, in a process of their own."""
    command = [sys.executable, "-m", "jaxmem.lab.tour.training"]
    text = json.dumps(runs)
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)  # noqa: S603 - this Python
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise UserError(f"a run of the tour failed: {lines[-1] if lines else f'exit code {done.returncode}'}")
    return {name: Outcome(*one) for name, one in json.loads(done.stdout.splitlines()[-1]).items()}


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


if __name__ == "__main__":
    devices.use_cpu_without_gpu()
    print(json.dumps({name: _train(SmallRun(*run)) for name, run in json.load(sys.stdin).items()}))
