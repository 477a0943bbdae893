"""A long run of the demo's model: what grows with its steps? The figures of docs/faults.md.

    python -m tests.support.long_run                       # 2,000 steps, 8 simulated devices
    python -m tests.support.long_run --steps 500 batch.global_size=16 data.sequence_length=256

Sampled from outside while it runs: host memory, open files, programs compiled, and processor seconds a step, which are
the same on a busy machine. It evaluates and saves on the way; what grows with the number of either would show. Fewer
tokens a step than the demo's by default, since what is looked for grows by step.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxmem.config import load_config
from tests.support.scene import Scene, Started

ROOT = Path(__file__).parents[2]
SMALLER = [
    "model={preset: tiny, layers: 6, mlp: 512}", "data.tokenizer=bytes", "mesh={fsdp: 4, tensor: 2}",
    "optimizer={name: adamw, learning_rate: 3e-3}", "batch.global_size=8", "data.sequence_length=64",
    "train.evaluate_every=100", "checkpoint.every=100",
]  # fmt: skip
SETTLED = 0.25  # of the run, after which nothing should grow


class Sample(NamedTuple):
    step: int
    memory: int  # resident bytes
    files: int
    programs: int  # in jax's cache
    seconds: float  # of a processor


def sample(scene: Scene, started: Started) -> Sample | None:
    rows = [row for row in scene.rows("long") if "loss" in row]
    pid = started.processes[0].pid
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    except OSError:  # it has ended
        return None
    resident = next((line for line in status.splitlines() if line.startswith("VmRSS")), None)
    if not rows or resident is None:
        return None
    programs = len(list((scene.place / "compiled").glob("*-cache")))
    return Sample(rows[-1]["step"], int(resident.split()[1]) << 10, files, programs, started.seconds())


def summary(samples: list[Sample]) -> dict[str, Any]:
    late = [one for one in samples if one.step >= SETTLED * samples[-1].step]
    steps = np.array([one.step for one in late])
    slope = np.polyfit(steps, [one.memory for one in late], 1)[0]
    halves = [late[: len(late) // 2 + 1], late[len(late) // 2 :]]
    rates = [(half[-1].seconds - half[0].seconds) / max(half[-1].step - half[0].step, 1) for half in halves]
    return {
        "steps": samples[-1].step,
        "samples": len(samples),
        "MiB when settled": round(late[0].memory / 2**20),
        "MiB in the end": round(late[-1].memory / 2**20),
        "KiB a step": round(slope / 2**10, 2),
        "open files": [late[0].files, max(one.files for one in late), late[-1].files],
        "programs": [late[0].programs, late[-1].programs],
        "processor ms a step": [round(1000 * rate, 1) for rate in rates],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="of configs/demo.yaml")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--every", type=float, default=2.0, metavar="S", help="seconds from sample to sample")
    args = parser.parse_args()
    overrides = [*SMALLER, f"train.steps={args.steps}", *args.overrides]
    cfg = load_config(ROOT / "configs/demo.yaml", overrides)
    samples: list[Sample] = []
    with tempfile.TemporaryDirectory() as folder:
        scene = Scene(Path(folder), cfg.model_dump(mode="json", exclude_unset=True))
        started = scene.start("long", devices=8, sections={"data": {"path": None}, "train": {"log_every": 5}})
        while not started.ended:
            time.sleep(args.every)
            if (one := sample(scene, started)) and (not samples or one.step > samples[-1].step):
                samples.append(one)
                if len(samples) % 50 == 0:
                    print(json.dumps(summary(samples)), file=sys.stderr, flush=True)
        if started.codes != [0] or len(samples) < 8:
            print(started.told[-3000:], file=sys.stderr)
            return 1
    print(json.dumps(summary(samples)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
