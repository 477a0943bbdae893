"""Planned and measured peak memory on the GPU of this machine, for configs of different shape; JSON with --output.

    python scripts/measure/measure_plan.py --output docs/benchmarks/measured-plan.json

Each config runs three steps in a process of its own; after --minutes the rest is reported as not run. On a machine
without a GPU the same configs run on tiny shapes, without measurements, since a CPU reports no peak.
"""

from __future__ import annotations

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
from typing import Any

from jaxmem.machine import devices
from jaxmem.planning.measure import measure_apart

MODELS = {
    "130m": {"family": "decoder", "vocab": 32000, "layers": 12, "embed": 768, "mlp": 2048, "heads": 12, "kv_heads": 12,
             "head_dim": 64},
    "1b": {"family": "decoder", "vocab": 128256, "layers": 16, "embed": 2048, "mlp": 8192, "heads": 32, "kv_heads": 8,
           "head_dim": 64},
}  # fmt: skip
TINY = {"vocab": 264, "layers": 2, "embed": 32, "mlp": 64, "heads": 4, "kv_heads": 2, "head_dim": 8}
NO_TIME = "not run: out of time"
BF16, SMALL_STATE = {"parameters": "bfloat16"}, {"name": "adamw8bit", "clip_by": "previous"}
LONG = {"sequence_length": 4096}
# The most different configs come first, so that little time measures many kinds of steps.
CONFIGS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("130m", {}),
    ("1b", {"memory": {"remat": "full"}}),
    ("1b", {"memory": {"remat": "full", "update": "during"}, "precision": BF16, "optimizer": SMALL_STATE}),
    ("1b", {"memory": {"remat": "full", "update": "during"}, "precision": {"parameters": "int8"},
            "optimizer": {"name": "apollo_mini", "clip_by": "previous", "project_embeddings": True}}),
    ("1b", {"memory": {"remat": "full"}, "precision": BF16 | {"master": "remainder8"},
            "optimizer": {"name": "adamw8bit"}}),
    ("1b", {"memory": {"remat": "full", "attention": "triton"}, "precision": BF16, "data": LONG}),
    ("1b", {"memory": {"remat": "full", "loss_chunk": 8192}, "precision": BF16, "batch": {"global_size": 16}}),
    ("1b", {"memory": {"remat": "dots"}, "data": {"sequence_length": 2048}, "batch": {"global_size": 2}}),
    ("130m", {"memory": {"remat": "full"}, "batch": {"global_size": 32, "accumulate": 4}}),
    ("130m", {"memory": {"remat": "sqrt"}, "batch": {"global_size": 32}}),
    ("130m", {"optimizer": {"name": "adafactor"}}),
    ("130m", {"optimizer": {"name": "galore_adamw", "rank": 192}, "memory": {"remat": "full"}}),
    ("130m", {"memory": {"remat": "dots"}}),
    ("1b", {"memory": {"remat": "full"}, "precision": BF16 | {"master": "float32"}}),
    ("130m", {"data": LONG, "batch": {"global_size": 2}, "memory": {"remat": "full", "loss_chunk": 32000}}),
    ("130m", {"precision": BF16}),
    ("130m", {"memory": {"update": "during"}}),
    ("130m", {"optimizer": {"name": "lion"}}),
    ("130m", {"memory": {"remat": "full"}, "batch": {"global_size": 32}}),
)  # fmt: skip


def configs(*, tiny: bool) -> list[dict[str, Any]]:
    """Complete configs. Their data is never read."""
    found = []
    for number, (model, changes) in enumerate(CONFIGS):
        raw: dict[str, Any] = {
            "name": f"{number:02}-{model}",
            "model": MODELS[model] | (TINY if tiny else {}),
            "data": {"source": "tokens", "path": "unused", "sequence_length": 1024},
            "batch": {"global_size": 8},
            "train": {"steps": 10},
        }
        for section, fields in changes.items():
            raw[section] = raw.get(section, {}) | fields
        if tiny:
            raw["data"]["sequence_length"] = 16
            if "loss_chunk" in raw.get("memory", {}):
                raw["memory"]["loss_chunk"] = 64
            if "rank" in raw.get("optimizer", {}):
                raw["optimizer"]["rank"] = 8
        found.append(raw)
    return found


def commit() -> str | None:
    """The commit of the sources; with `+` if they have uncommitted changes."""
    git = shutil.which("git")
    if git is None:
        return None
    ask = [git, "-C", str(Path(__file__).parent), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+"]
    done = subprocess.run(ask, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="where the JSON goes; default: standard output")
    parser.add_argument("--first", type=int, help="run only the first N configs")
    parser.add_argument("--minutes", type=float, default=8.5, help="what is left then is reported as not run")
    given = parser.parse_args(arguments)
    gpus = devices.nvidia_gpus() if devices.has_nvidia_gpu() else []
    if not gpus:
        print("no GPU here: tiny shapes on the CPU, nothing is measured", file=sys.stderr)
    start, rows = time.monotonic(), list[dict[str, Any]]()
    every = configs(tiny=not gpus)[: given.first]
    for raw in every:
        left = 60 * given.minutes - (time.monotonic() - start)
        row = measure_apart(raw, None if gpus else 1, left) if left > 0 else {"name": raw["name"], "error": NO_TIME}
        rows.append(row | {"config": raw})
        line = row.get("error") or f"planned {row['planned']:,} measured {row['measured']}"
        print(f"{raw['name']}: {line}", file=sys.stderr)
        # After each config, so that an interrupted script leaves its results.
        write(given.output, summary(rows, gpus), done=len(rows) == len(every))
    return int(any("error" in row for row in rows))


def summary(rows: Sequence[dict[str, Any]], gpus: Sequence[dict[str, Any]]) -> dict[str, Any]:
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


def write(output: Path | None, found: dict[str, Any], *, done: bool) -> None:
    text = json.dumps(found, indent=2) + "\n"
    if output:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text)
    elif done:
        print(text, end="")


if __name__ == "__main__":
    sys.exit(main())
