"""Planned bytes against what the GPU of this machine measured, for configs of different shape; JSON with --output.

    python scripts/measure_plan.py --output docs/benchmarks/measured-plan.json

Each config runs three steps in a process of its own. On a machine without a GPU the same configs run on tiny shapes:
every path but the measuring, since a CPU does not tell its peak.
"""

from __future__ import annotations

import argparse
import datetime as dt
import importlib.metadata
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from jaxmem import devices
from jaxmem.planning.measure import apart

MODELS = {
    "130m": {"family": "decoder", "vocab": 32000, "layers": 12, "embed": 768, "mlp": 2048, "heads": 12, "kv_heads": 12,
             "head_dim": 64},
    "1b": {"family": "decoder", "vocab": 128256, "layers": 16, "embed": 2048, "mlp": 8192, "heads": 32, "kv_heads": 8,
           "head_dim": 64},
}  # fmt: skip
TINY = {"vocab": 264, "layers": 2, "embed": 32, "mlp": 64, "heads": 4, "kv_heads": 2, "head_dim": 8}
CONFIGS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("130m", {}),
    ("130m", {"memory": {"remat": "dots"}}),
    ("130m", {"memory": {"remat": "full"}}),
    ("130m", {"memory": {"remat": "full"}, "batch": {"global_size": 32}}),
    ("130m", {"memory": {"remat": "full"}, "batch": {"global_size": 32, "accumulate": 4}}),
    ("130m", {"data": {"sequence_length": 4096}, "batch": {"global_size": 2}, "memory": {"remat": "full"}}),
    ("130m", {"precision": {"parameters": "bfloat16"}}),
    ("130m", {"precision": {"parameters": "bfloat16", "master": "float32"}}),
    ("130m", {"optimizer": {"name": "lion"}}),
    ("130m", {"optimizer": {"name": "adafactor"}}),
    ("1b", {"memory": {"remat": "full"}}),
    ("1b", {"memory": {"remat": "full"}, "precision": {"parameters": "bfloat16"}}),
    ("1b", {"memory": {"remat": "dots"}, "data": {"sequence_length": 2048}, "batch": {"global_size": 2}}),
    ("1b", {"memory": {"remat": "full"}, "precision": {"parameters": "bfloat16", "master": "float32"}}),
)


def configs(*, tiny: bool) -> list[dict[str, Any]]:
    """Whole configs; data is never read, so its path need not be there."""
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
        found.append(raw)
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="where the JSON goes; default: standard output")
    parser.add_argument("--first", type=int, help="only so many configs")
    given = parser.parse_args(arguments)
    gpus = devices.gpus() if devices.has_nvidia_gpu() else []
    if not gpus:
        print("no GPU here: tiny shapes on the CPU, nothing is measured", file=sys.stderr)
    rows = []
    for raw in configs(tiny=not gpus)[: given.first]:
        row = apart(raw, None if gpus else 1) | {"config": raw}
        rows.append(row)
        print(
            row["name"], row.get("error") or f"planned {row['planned']:,} measured {row['measured']}", file=sys.stderr
        )
    off = [abs(row["difference"]) for row in rows if row.get("difference") is not None]
    found = {
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "device": gpus[0]["name"] if gpus else "cpu",
        "driver": gpus[0]["driver"] if gpus else None,
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax", "optax")},
        "configs": rows,
        "largest_difference": max(off, default=None),
        "median_difference": statistics.median(off) if off else None,
    }
    text = json.dumps(found, indent=2) + "\n"
    if given.output:
        given.output.parent.mkdir(parents=True, exist_ok=True)
        given.output.write_text(text)
    else:
        print(text, end="")
    return int(any("error" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
