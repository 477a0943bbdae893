"""The cost of large data: host memory, indexing, and how long a step waits for it. The figures of docs/faults.md.

    python -m tests.support.load   # 10 GB of JSONL, 10,000 small files, a line of 200 MB; some minutes
    python -m tests.support.load jsonl --gb 1

The data is made in a temporary directory (TMPDIR), which is removed afterwards. Each case runs in a process of its own:
it indexes the data, reads batches of random records, and trains the demo's model on 8 simulated devices, counting the
time for which the devices had no batch.
"""

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
MODEL = ("model={preset: tiny, layers: 6, mlp: 512}", "mesh={fsdp: 4, tensor: 2}")


def words(draw: random.Random, size: int) -> str:
    """Text of about that many bytes."""
    return " ".join(f"{draw.getrandbits(40):x}" for _ in range(size // 11 + 1))[:size]


def write_jsonl(place: Path, size: int, draw: random.Random) -> str:
    """Documents of 100 bytes to 20 KB."""
    lines, length = [], 0
    while length < BLOCK:
        lines.append(json.dumps({"id": len(lines), "text": words(draw, int(10 ** draw.uniform(2, 4.3)))}) + "\n")
        length += len(lines[-1])
    for number in range(-(-size // FILE)):
        with (place / f"{number:03d}.jsonl").open("w") as file:
            for _ in range(FILE // length + 1):
                draw.shuffle(lines)
                file.writelines(lines)
    return "jsonl"


def write_small_files(place: Path, _: int, draw: random.Random) -> str:
    for number in range(10_000):
        (place / f"{number:05d}.txt").write_text(words(draw, draw.randrange(50, 3000)))
    return "text"


def write_long_line(place: Path, _: int, draw: random.Random) -> str:
    """One document of 200 MB, among small ones."""
    with (place / "long.jsonl").open("w") as file:
        for number in range(100):
            file.write(json.dumps({"text": words(draw, 1000)}) + "\n")
            if number == 50:
                part = words(draw, 1 << 20) + " "
                file.writelines(('{"text": "', *[part] * (200 * 10**6 // len(part)), '"}\n'))
    return "jsonl"


CASES: dict[str, Callable[[Path, int, random.Random], str]] = {
    "jsonl": write_jsonl,
    "small": write_small_files,
    "line": write_long_line,
}


def resident(kind: str = "VmRSS") -> int:
    """MiB of this process, now or at its peak (VmHWM)."""
    status = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in status if line.startswith(kind)).split()[1]) >> 10


def measure(cfg: Config) -> dict[str, Any]:
    """In this process, which must not have loaded any data before."""
    import jax

    from jaxmem.data.loader import Loader
    from jaxmem.step.programs import program

    built = program(cfg, jax.devices())
    before, start = resident(), time.monotonic()
    with Loader(cfg, rows=built.rows) as loader:
        indexing = time.monotonic() - start
        memory = [resident() - before]
        used = time.process_time()
        for number in range(BATCHES):
            next(loader)
            if number in (BATCHES // 10, BATCHES - 1):
                memory.append(resident() - before)
        each = (time.process_time() - used) / BATCHES
        return {
            "records": len(loader.corpus.sources[0]),
            "seconds to index": round(indexing, 1),
            "processor ms per batch": round(1000 * each, 2),
            "MiB indexed, after a tenth, after all": memory,
            "MiB at the peak": resident("VmHWM") - before,
            **train(built, loader),
        }


def train(built: Any, loader: Any) -> dict[str, Any]:
    state, step = built.initialise(), built.lower_step().compile()
    state, metrics = step(state, built.place(next(loader)))
    float(metrics["loss"])
    waiting, start = 0.0, time.monotonic()
    for _ in range(STEPS):
        asked = time.monotonic()
        batch = next(loader)
        waiting += time.monotonic() - asked
        last = metrics
        state, metrics = step(state, built.place(batch))
        float(last["loss"])  # one step late, as a run does
    float(metrics["loss"])
    duration = time.monotonic() - start
    return {"ms per step": round(1000 * duration / STEPS), "share waited for data": round(waiting / duration, 5)}


def run_case(name: str, size: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "data")
        place.mkdir()
        if shutil.disk_usage(folder).free < 1.5 * size:
            raise SystemExit(f"{folder}: needs {1.5 * size / GB:.0f} GB free; set TMPDIR, or reduce --gb")
        source = CASES[name](place, size, random.Random(0))  # the same data each time
        settings = {"data.source": source, "data.path": str(place), "output": folder}
        overrides = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
        command = [sys.executable, __file__, "--measure", *overrides]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        sizes = [file.stat().st_size for file in place.iterdir()]
        return {"files": len(sizes), "MB": round(sum(sizes) / 10**6), **json.loads(done.stdout.splitlines()[-1])}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}; default: all")
    options.add_argument("--gb", type=float, default=10.0, help="of JSONL (10)")
    options.add_argument("--measure", nargs="+", help="overrides: measure in this process")
    args = options.parse_args()
    if args.measure:
        from jaxmem.machine.devices import simulate

        simulate(8)
        print(json.dumps(measure(load_config(ROOT / "configs/demo.yaml", [*MODEL, *args.measure]))))
        return
    if unknown := [name for name in args.cases if name not in CASES]:
        options.error(f"unknown case {unknown[0]!r}; expected one of {', '.join(CASES)}")
    for name in args.cases or CASES:
        print(name, json.dumps(run_case(name, int(args.gb * GB) if name == "jsonl" else GB)), flush=True)


if __name__ == "__main__":
    main()
