"""Planned and measured peak memory on the GPU of this machine, for configs of different shapes, as JSON.

    python scripts/bench/measure_plan.py --output docs/benchmarks/measured-plan.json

Each config runs three steps in a process of its own; configs that have not started after --minutes are not run. On a
machine without a GPU the same configs run with tiny shapes, without measurements, since a CPU reports no peak.
"""

import argparse
import datetime as dt
import importlib.metadata
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from jaxmem.machine import devices
from jaxmem.typing import JsonDict
from scripts.course.common import measure_apart

sys.path.append(str(Path(__file__).parents[2]))

from tests.support.measured_configs import configs

NO_TIME = "not run: out of time"


def commit() -> str | None:
    """The commit of the sources, with `+` if there are uncommitted changes."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+"]
    done = subprocess.run(git, capture_output=True, text=True, check=False) if shutil.which("git") else None
    return (done.stdout.strip() or None) if done else None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="the file of the JSON; default: standard output")
    parser.add_argument("--first", type=int, help="run only the first N configs")
    parser.add_argument("--minutes", type=float, default=8.5, help="time after which no config is started")
    args = parser.parse_args(arguments)
    gpus = devices.nvidia_gpus() if devices.has_nvidia_gpu() else []
    if not gpus:
        print("no GPU on this machine: tiny shapes on the CPU, without measurements", file=sys.stderr)
    start = time.monotonic()
    rows = list[JsonDict]()
    for raw in configs(tiny=not gpus)[: args.first]:
        left = 60 * args.minutes - (time.monotonic() - start)
        row = measure_apart(raw, None if gpus else 1, left) if left > 0 else {"name": raw["name"], "error": NO_TIME}
        rows.append(row | {"config": raw})
        line = row.get("error") or f"planned {row['planned']:,} measured {row['measured']}"
        print(f"{raw['name']}: {line}", file=sys.stderr)
        text = json.dumps(summary(rows, gpus), indent=2) + "\n"
        if args.output:  # after each config, so that an interrupted script leaves its results
            args.output.parent.mkdir(parents=True, exist_ok=True)
            args.output.write_text(text)
    if not args.output:
        print(text, end="")
    return int(any("error" in row for row in rows))


def summary(rows: Sequence[JsonDict], gpus: Sequence[JsonDict]) -> JsonDict:
    off = [abs(row["difference"]) for row in rows if row.get("difference") is not None]
    return {
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "device": gpus[0]["name"] if gpus else "cpu",
        "driver": gpus[0]["driver"] if gpus else None,
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax", "optax")},
        "commit": commit(),
        "configs": rows,
        "largest_difference": max(off, default=None),
        "median_difference": statistics.median(off) if off else None,
    }


if __name__ == "__main__":
    sys.exit(main())
