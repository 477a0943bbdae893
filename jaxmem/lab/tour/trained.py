"""Small runs of `jaxmem train`, for their results alone: side by side, nothing of them is printed or kept.

Each is small and runs for seconds, so most of its time is compiling, on one core: on a CPU there are as many processes
as cores. On a GPU one process does all.
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

# A language model of bytes that learns in seconds.
DECODER: Mapping[str, Any] = {
    "family": "decoder", "vocab": 257, "layers": 2, "embed": 64, "mlp": 192, "heads": 4, "kv_heads": 4, "head_dim": 16,
}  # fmt: skip


class Run(NamedTuple):
    """What is to be trained; its directory is `place`, or gone."""

    given: Mapping[str, Any]
    overrides: Sequence[str] = ()
    place: str | None = None


class Ran(NamedTuple):
    """What it came to: its plan as `jaxmem plan --json` has it, and its error on what it never saw."""

    plan: dict[str, Any]
    held_out: dict[str, float]


def trained(runs: Mapping[str, Run]) -> dict[str, Ran]:
    """What each run comes to on one device."""
    count = min(len(runs), _processes())
    shares = [dict(list(runs.items())[first::count]) for first in range(count)]
    with ThreadPoolExecutor(count) as pool:
        ran = dict(one for share in pool.map(_apart, shares) for one in share.items())
    return {name: ran[name] for name in runs}


def _processes() -> int:
    if devices.has_nvidia_gpu():
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _apart(runs: Mapping[str, Run]) -> dict[str, Ran]:
    """One after the other, in a process of their own."""
    done = subprocess.run(
        [sys.executable, "-m", "jaxmem.lab.tour.trained"],
        input=json.dumps(runs),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        raise UserError(f"a run of the tour failed: {said[-1] if said else f'code {done.returncode}'}")
    return {name: Ran(*one) for name, one in json.loads(done.stdout.splitlines()[-1]).items()}


def _ran(run: Run) -> Ran:
    steps = run.given["train"]["steps"]
    often = {**run.given["train"], "evaluate_every": steps, "log_every": steps}
    with tempfile.TemporaryDirectory() as gone, contextlib.redirect_stdout(io.StringIO()):
        place = Path(run.place or Path(gone) / "run")
        own = {"name": place.name, "output": str(place.parent), "train": often}
        cfg = load_config({**run.given, **own}, run.overrides)  # before jax starts, which takes longer
        import jax

        from jaxmem.training.run import run as train

        result = train(cfg, jax.devices()[:1])
        return Ran(result.plan.as_json(), dict(result.held_out))


def _main() -> None:
    devices.use_cpu_without_gpu()
    print(json.dumps({name: _ran(Run(*run)) for name, run in json.load(sys.stdin).items()}))


if __name__ == "__main__":
    _main()
