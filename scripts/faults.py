"""Ways to lose a run, tried: each must be harmless, or said. The figures of docs/faults.md.

    python scripts/faults.py                  # all: some minutes on two cores
    python scripts/faults.py kills -n 50      # SIGKILL at 50 random moments of one process
    python scripts/faults.py --json FILE

Every fault is done to a small run in processes of its own, which is then started again until it is finished. It must
end with the very losses of a run that nobody disturbed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxmem.config import load_config, save_config

STEPS, EVERY = 40, 4
PATIENCE = 300  # seconds that any one start may take
ENVIRONMENT = {**os.environ, "JAX_PLATFORMS": "cpu"}


class Scene:
    """A folder with text to learn from, and runs in it."""

    def __init__(self, place: Path, seed: int) -> None:
        self.place, self.draw = place, random.Random(seed)  # noqa: S311, which is to give the same again
        for number in range(40):
            words = (f"{(number * 7 + i * i) % 101} bottles" for i in range(60 + 5 * number))
            (place / f"{number}.txt").write_text("\n".join(words))
        started = time.monotonic()
        self.finish("whole")
        self.seconds = time.monotonic() - started
        self.expected = self.losses("whole")

    def command(self, name: str, processes: int = 1) -> list[str]:
        file = self.place / f"{name}.yaml"
        save_config(
            load_config(
                {
                    "name": name,
                    "output": str(self.place / "runs"),
                    "model": {"preset": "tiny", "layers": 1, "embed": 32, "mlp": 64, "heads": 4, "kv_heads": 4},
                    "data": {"source": "text", "path": str(self.place / "*.txt"), "sequence_length": 32},
                    "batch": {"global_size": 8},
                    "mesh": {"fsdp": 2},
                    "train": {"steps": STEPS, "log_every": 1},
                    "checkpoint": {"every": EVERY},
                    "cluster": {"heartbeat": 4, "preflight": False},
                }
            ),
            file,
        )
        train = [sys.executable, "-m", "jaxmem", "train", str(file)]
        if processes == 1:
            return [*train, "--simulate", "2"]
        return [sys.executable, "-m", "jaxmem", "launch", "-n", str(processes), "--devices", "1", "--", *train]

    def start(self, name: str, processes: int = 1) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(name, processes),
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def finish(self, name: str, processes: int = 1) -> str:
        """Start until it is done, as a scheduler would; all that was said."""
        told = ""
        for _ in range(5):
            process = self.start(name, processes)
            told += process.communicate(timeout=PATIENCE)[0]
            if process.returncode == 0:
                return told
        raise SystemExit(f"{name} does not finish:\n{told[-3000:]}")

    def losses(self, name: str) -> list[tuple[int, float]]:
        lines = (self.place / "runs" / name / "metrics.jsonl").read_text().splitlines()
        return [(row["step"], row["loss"]) for row in map(json.loads, lines)]

    def until_step(self, name: str, step: int) -> None:
        file, end = self.place / "runs" / name / "metrics.jsonl", time.monotonic() + PATIENCE
        while not (file.exists() and file.read_text().count("\n") >= step):
            if time.monotonic() > end:
                raise SystemExit(f"{name} does not come to step {step}")
            time.sleep(0.02)

    def newest(self, name: str) -> Path:
        kept = self.place / "runs" / name / "checkpoints"
        return max((path for path in kept.iterdir() if path.name.isdigit()), key=lambda path: int(path.name))


def kills(scene: Scene, number: int, processes: int = 1) -> dict[str, Any]:
    """SIGKILL of all processes at random moments, from importing to writing the last checkpoint."""
    name, done, runs = f"killed-{processes}", 0, 0
    steps: list[int] = []
    same = True
    while done < number:
        process = scene.start(f"{name}-{runs}", processes)
        try:
            process.wait(timeout=scene.draw.random() * scene.seconds * (1.2 if processes == 1 else 2.0))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            done += 1
            file = scene.place / "runs" / f"{name}-{runs}" / "metrics.jsonl"
            steps.append(file.read_text().count("\n") if file.exists() else 0)
        process.communicate()
        if process.returncode == 0 or done == number:
            scene.finish(f"{name}-{runs}", processes)
            same &= scene.losses(f"{name}-{runs}") == _expected(scene, processes)
            runs += 1
    return {"times": done, "runs": runs, "after steps": sorted(steps), "same losses": same}


def _expected(scene: Scene, processes: int) -> list[tuple[int, float]]:
    if processes > 1 and not (scene.place / "runs" / f"whole-{processes}").exists():
        scene.finish(f"whole-{processes}", processes)
    return scene.expected if processes == 1 else scene.losses(f"whole-{processes}")


def _without_metadata(step: Path) -> None:
    (step / "run" / "metadata").write_bytes(b"")


def _data(step: Path) -> Path:
    return max((path for path in (step / "state").rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def _missing(step: Path) -> None:
    _data(step).unlink()


def _truncated(step: Path) -> None:
    os.truncate(_data(step), _data(step).stat().st_size // 2)


def _flipped(step: Path) -> None:
    file = _data(step)
    values = bytearray(file.read_bytes())
    values[len(values) // 2] ^= 1
    file.write_bytes(values)


def _emptied(step: Path) -> None:
    for path in (step / "state").iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


DAMAGES = {
    "a file missing": _missing,
    "a file cut short": _truncated,
    "a bit flipped": _flipped,
    "metadata emptied": _without_metadata,
    "data emptied": _emptied,
}


def damages(scene: Scene) -> Iterator[tuple[str, dict[str, Any]]]:
    """The newest checkpoint damaged after a run was killed."""
    for number, (what, damage) in enumerate(DAMAGES.items()):
        name = f"damaged-{number}"
        process = scene.start(name)
        scene.until_step(name, STEPS // 2)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        damage(scene.newest(name))
        told = scene.finish(name)
        yield what, {"said": "is damaged" in told, "same losses": scene.losses(name) == scene.expected}


def all_damaged(scene: Scene) -> dict[str, Any]:
    """With no whole checkpoint left the run must not begin anew."""
    process = scene.start("hopeless")
    scene.until_step("hopeless", STEPS // 2)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    for step in (scene.place / "runs" / "hopeless" / "checkpoints").iterdir():
        if step.name.isdigit():
            _flipped(step)
    process = scene.start("hopeless")
    told = process.communicate(timeout=PATIENCE)[0]
    return {"exit code": process.returncode, "said": "can be read" in told and "Traceback" not in told}


def frozen(scene: Scene) -> dict[str, Any]:
    """One of two processes stopped by SIGSTOP: the other must end and name it; both go on when started again."""
    process = scene.start("frozen", 2)
    scene.until_step("frozen", STEPS // 4)
    children = subprocess.run(
        ["pgrep", "-P", str(process.pid)],
        capture_output=True,
        text=True,
        check=True,
    )
    victim = int(children.stdout.split()[-1])
    os.kill(victim, signal.SIGSTOP)
    began = time.monotonic()
    told = process.communicate(timeout=PATIENCE)[0]
    seconds = time.monotonic() - began
    scene.finish("frozen", 2)
    return {
        "seconds": round(seconds, 1),
        "named": "process 1 of 2" in told,
        "same losses": scene.losses("frozen") == _expected(scene, 2),
    }


def second(scene: Scene) -> dict[str, Any]:
    """A second run in the same directory; and one after the first was killed."""
    process = scene.start("twice")
    scene.until_step("twice", 1)
    os.killpg(process.pid, signal.SIGSTOP)  # or it might be finished before the other one has begun
    other = scene.start("twice")
    told = other.communicate(timeout=PATIENCE)[0]
    refused = other.returncode == 2 and "is writing it" in told
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    scene.finish("twice")
    return {"refused": refused, "same losses": scene.losses("twice") == scene.expected}


def vanished(scene: Scene) -> dict[str, Any]:
    """The directory of a run taken away under it."""
    process = scene.start("vanished")
    scene.until_step("vanished", 2 * EVERY)
    (scene.place / "runs" / "vanished").rename(scene.place / "runs" / "elsewhere")
    told = process.communicate(timeout=PATIENCE)[0]
    (scene.place / "runs" / "elsewhere").rename(scene.place / "runs" / "back")
    return {"exit code": process.returncode, "said": "Traceback" not in told, "last line": told.splitlines()[-1][:160]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    faults: dict[str, Callable[[Scene], Iterator[tuple[str, dict[str, Any]]]]] = {
        "kills": lambda scene: iter([("SIGKILL, one process", kills(scene, args.n))]),
        "kills-2": lambda scene: iter([("SIGKILL, two processes", kills(scene, args.n, processes=2))]),
        "damages": damages,
        "all-damaged": lambda scene: iter([("every checkpoint damaged", all_damaged(scene))]),
        "frozen": lambda scene: iter([("SIGSTOP, one of two processes", frozen(scene))]),
        "second": lambda scene: iter([("a second run in the directory", second(scene))]),
        "vanished": lambda scene: iter([("the directory gone", vanished(scene))]),
    }
    parser.add_argument("names", nargs="*", metavar="FAULT", help=f"of {', '.join(faults)}; all by default")
    parser.add_argument("-n", type=int, default=50, help="how often a run is killed (50)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what came of each")
    args = parser.parse_args()
    if unknown := [name for name in args.names if name not in faults]:
        parser.error(f"no fault {unknown[0]!r}; known: {', '.join(faults)}")
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        scene = Scene(Path(folder), args.seed)
        for name in args.names or faults:
            for what, outcome in faults[name](scene):
                found[what] = outcome
                print(f"{what}: {json.dumps(outcome)}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    return int(any(value is False for outcome in found.values() for value in outcome.values()))


if __name__ == "__main__":
    sys.exit(main())
