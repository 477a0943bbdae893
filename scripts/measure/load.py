"""Data by the ton: what it costs in memory and waiting. The figures of docs/faults.md.

    python scripts/measure/load.py   # 10 GB of JSONL, 10,000 small files, a line of 200 MB; some minutes
    python scripts/measure/load.py jsonl --gb 1

The data is made on the spot, in a temporary directory (TMPDIR), and goes with it. Each case runs in a process of its
own: it indexes the data, reads batches of random records, and trains the demo's model on 8 simulated devices, counting
the time in which the devices had nothing to do because a batch was not there.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxmem.config import Config, load_config

ROOT = Path(__file__).parents[2]
GB = 10**9
FILE = GB // 2  # bytes of each file of JSONL
BLOCK = 16 << 20
BATCHES, STEPS = 2000, 30  # read, and trained on


def words(draw: random.Random, size: int) -> str:
    """Text of about so many bytes."""
    return " ".join(f"{draw.getrandbits(40):x}" for _ in range(size // 11 + 1))[:size]


def jsonl(place: Path, size: int) -> str:
    """Documents of 100 bytes to 20 KB."""
    draw = random.Random(0)  # noqa: S311, which is to give the same again
    lines, made = [], 0
    while made < BLOCK:
        lines.append(json.dumps({"id": len(lines), "text": words(draw, int(10 ** draw.uniform(2, 4.3)))}) + "\n")
        made += len(lines[-1])
    for number in range(-(-size // FILE)):
        with (place / f"{number:03d}.jsonl").open("w") as file:
            for _ in range(FILE // made + 1):
                draw.shuffle(lines)
                file.writelines(lines)
    return "jsonl"


def small(place: Path, _: int) -> str:
    """10,000 small files."""
    draw = random.Random(0)  # noqa: S311
    for number in range(10_000):
        (place / f"{number:05d}.txt").write_text(words(draw, draw.randrange(50, 3000)))
    return "text"


def line(place: Path, _: int) -> str:
    """One document of 200 MB, among small ones."""
    draw = random.Random(0)  # noqa: S311
    with (place / "long.jsonl").open("w") as file:
        for number in range(100):
            file.write(json.dumps({"text": words(draw, 1000)}) + "\n")
            if number == 50:
                file.write('{"text": "')
                part = words(draw, 1 << 20) + " "
                for _ in range(200 * 10**6 // len(part)):
                    file.write(part)
                file.write('"}\n')
    return "jsonl"


CASES: dict[str, Callable[[Path, int], str]] = {"jsonl": jsonl, "small": small, "line": line}


def resident(kind: str = "VmRSS") -> int:
    """MiB of this process, now or at its peak (VmHWM)."""
    status = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in status if line.startswith(kind)).split()[1]) >> 10


def measure(cfg: Config) -> dict[str, Any]:
    """Here, in a process that has seen nothing else."""
    import jax

    from jaxmem.data import Loader
    from jaxmem.step import program

    built = program(cfg, jax.devices())
    before, began = resident(), time.monotonic()
    with Loader(cfg, rows=built.rows) as loader:
        indexed = time.monotonic() - began
        found: dict[str, Any] = {"records": len(loader.corpus.sources[0]), "seconds to index": round(indexed, 1)}
        memory = [resident() - before]
        began, used = time.monotonic(), time.process_time()
        for number in range(BATCHES):
            next(loader)
            if number in (BATCHES // 10, BATCHES - 1):
                memory.append(resident() - before)
        each = (time.process_time() - used) / BATCHES
        found |= {"processor ms a batch": round(1000 * each, 2)}
        found |= {"MiB indexed, after a tenth, after all": memory, "MiB at the peak": resident("VmHWM") - before}
        return found | _trained(built, loader)


def _trained(built: Any, loader: Any) -> dict[str, Any]:
    state, step = built.initialise(), built.lower_step().compile()
    state, metrics = step(state, built.place(next(loader)))
    float(metrics["loss"])
    waited, began = 0.0, time.monotonic()
    for _ in range(STEPS):
        asked = time.monotonic()
        batch = next(loader)
        waited += time.monotonic() - asked
        last = metrics
        state, metrics = step(state, built.place(batch))
        float(last["loss"])  # one step late, as a run does
    float(metrics["loss"])
    took = time.monotonic() - began
    return {"ms a step": round(1000 * took / STEPS), "share of it waited for data": round(waited / took, 5)}


def case(name: str, size: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "data")
        place.mkdir()
        if shutil.disk_usage(folder).free < 1.5 * size:
            raise SystemExit(f"{folder}: less than {1.5 * size / GB:.0f} GB free; set TMPDIR, or give less --gb")
        kind = CASES[name](place, size)
        files = list(place.iterdir())
        asked = {"data.source": kind, "data.path": str(place), "output": folder}
        overrides = [f"{key}={json.dumps(value)}" for key, value in asked.items()]
        command = [sys.executable, __file__, "--measure", *overrides]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        total = sum(file.stat().st_size for file in files)
        return {"files": len(files), "MB": round(total / 10**6), **json.loads(done.stdout.splitlines()[-1])}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(CASES)}; all by default")
    parser.add_argument("--gb", type=float, default=10.0, help="of JSONL (10)")
    parser.add_argument("--measure", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        from jaxmem.machine.devices import simulate

        simulate(8)
        print(json.dumps(measure(load_config(ROOT / "configs/demo.yaml", args.measure))))
        return 0
    if unknown := [name for name in args.names if name not in CASES]:
        parser.error(f"no case {unknown[0]!r}; known: {', '.join(CASES)}")
    for name in args.names or CASES:
        print(name, json.dumps(case(name, int(args.gb * GB) if name == "jsonl" else GB)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
