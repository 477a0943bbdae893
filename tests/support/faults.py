"""Ways to lose a run, tried: each must be harmless, or said. The figures of docs/faults.md.

    python -m tests.support.faults                  # all: half an hour of a processor
    python -m tests.support.faults kills -n 50      # SIGKILL at 50 random moments of one process
    python -m tests.support.faults --json FILE

Every fault is done to a small run in processes of its own, which is then started again until it is finished. It must
end with the very losses and weights of a run that nobody disturbed.
"""

import argparse
import functools
import itertools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.support.scene import Disk, Network, Scene, Started, StuckError

STEPS, EVERY, HEARTBEAT = 24, 2, 10
CONFIG = {
    "model": {"preset": "tiny", "layers": 1, "embed": 32, "mlp": 64, "heads": 4, "kv_heads": 4},
    "data": {"source": "text", "sequence_length": 32},
    "batch": {"global_size": 8},
    "mesh": {"fsdp": 2},
    "train": {"steps": STEPS, "log_every": 1},
    "checkpoint": {"every": EVERY},
    "cluster": {"heartbeat_timeout": HEARTBEAT, "preflight": False},
}

PAIRS = {"source": "preference", "path": "preferences.jsonl", "sequence_length": 48, "packing": False}
CONFIGS = {  # of runs that are killed
    "kills-qlora": CONFIG | {"adapter": {"kind": "qlora", "rank": 4}},
    "kills-dpo": CONFIG | {"objective": {"name": "dpo"}, "data": PAIRS},
}

Outcomes = Iterator[tuple[str, dict[str, Any]]]


@functools.cache
def undisturbed(scene: Scene, processes: int = 1) -> tuple[Any, ...]:
    scene.finish(f"whole-{processes}", processes)
    return scene.outcome(f"whole-{processes}")


def clear(told: str) -> bool:
    return "Traceback" not in told and "error: " in told


# ------------------------------------------------------------------ killed


def kills(scene: Scene, number: int, seed: int, processes: int = 1) -> Outcomes:
    """SIGKILL of all processes at random moments. Every other one by a processor second of the whole, of which most is
    spent before the first step; the others at a random step, in turn just after it, while a checkpoint is written and
    while an old one is removed. Every fourth run finds nothing compiled but what those before it leave."""
    draw = random.Random(seed)
    seconds = _pace(scene, processes)
    kind = "one process" if processes == 1 else f"{processes} processes"
    done, run, wrong = 0, 0, 0
    moments: Counter[str] = Counter()
    while done < number:
        name = f"killed-{processes}-{run}"
        if run % 4 == 3 and not (scene.runs / name).exists():
            scene.forget_compiled()
        started = scene.start(name, processes)
        if _until_moment(scene, name, started, done, draw, seconds):
            started.kill()
            done += 1
            moments[_moment(scene, name, started)] += 1
        if finished := started.codes == [0] * processes:
            # Or one that was slow would put moments where nothing is left. Nobody counted where a step was waited for.
            seconds = min(seconds, started.seconds() or seconds)
        if not finished and done == number:
            scene.finish(name, processes)
        if finished or done == number:
            run += 1
            wrong += scene.outcome(name) != undisturbed(scene, processes)
            print(f"SIGKILL of {kind}: {done} of {number}, {run} runs, {wrong} differ", file=sys.stderr, flush=True)
    yield f"SIGKILL of {kind}", {"times": done, **moments, "runs": run, "runs that differ": wrong, "ok": wrong == 0}


def _pace(scene: Scene, processes: int) -> float:
    """Processor seconds of a run that finds everything compiled."""
    undisturbed(scene, processes)  # compiles
    started = scene.start("pace", processes)
    started.until(lambda: started.seconds() < 0 or started.ended)
    shutil.rmtree(scene.runs / "pace")
    return started.seconds()


def _until_moment(scene: Scene, name: str, started: Started, done: int, draw: random.Random, seconds: float) -> bool:
    """Whether it came before the run ended."""
    if done % 2 == 0:
        moment = draw.uniform(0, seconds)
        return started.until(lambda: started.seconds() >= moment) and not started.ended
    kept, rows = scene.runs / name / "checkpoints", len(scene.rows(name))
    step = draw.uniform(rows, STEPS) if rows < STEPS else STEPS
    started.until(lambda: len(scene.rows(name)) > step)
    if sight := (None, WRITTEN, REMOVED)[done // 2 % 3]:
        started.until(lambda: any(kept.glob(sight)))
    return not started.ended


WRITTEN, REMOVED = "*tmp*", ".rotated/*"  # what is seen in a directory of checkpoints meanwhile


def _moment(scene: Scene, name: str, started: Started) -> str:
    kept = scene.runs / name / "checkpoints"
    if "parameters, " not in started.told:
        return "while it started and compiled"
    if "step " not in started.told:
        return "before its first step"
    if any(kept.glob(REMOVED)):
        return "while an old checkpoint was removed"
    if any(kept.glob(WRITTEN)):
        return "while a checkpoint was written"
    return "between"


# ------------------------------------------------------------------ checkpoints that are damaged


def _data(step: Path) -> Path:
    return max((path for path in (step / "state").rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


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


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "a file missing": lambda step: _data(step).unlink(),
    "a file cut short": _truncated,
    "a bit flipped": _flipped,
    "its record emptied": lambda step: (step / "run" / "metadata").write_bytes(b""),
    "its metadata emptied": lambda step: (step / "_CHECKPOINT_METADATA").write_bytes(b""),
    "the arrays' metadata emptied": lambda step: (step / "state" / "_METADATA").write_bytes(b""),
    "its arrays gone": _emptied,
}


def damages(scene: Scene) -> Outcomes:
    """The newest checkpoint damaged after a run was killed."""
    for number, (what, damage) in enumerate(DAMAGES.items()):
        name = f"damaged-{number}"
        _killed(scene, name)
        damage(scene.checkpoints(name)[-1])
        told = scene.finish(name)
        same = scene.outcome(name) == undisturbed(scene)
        yield f"newest checkpoint: {what}", {"said": "is damaged" in told, "same": same, "ok": same}


def all_damaged(scene: Scene) -> Outcomes:
    """With no whole checkpoint left the run must not begin anew."""
    _killed(scene, "hopeless")
    for step in scene.checkpoints("hopeless"):
        _flipped(step)
    started = scene.start("hopeless")
    told = started.wait()
    ok = started.codes == [2] and clear(told) and "are damaged" in told
    yield "every checkpoint damaged", {"exit code": started.codes[0], "last line": _last(told), "ok": ok}


def _killed(scene: Scene, name: str) -> None:
    """In the middle."""
    started = scene.start(name)
    scene.until_step(started, name, STEPS // 2)
    started.kill()


def _last(told: str) -> str:
    return told.splitlines()[-1][:200] if told else ""


# ------------------------------------------------------------------ disks


def disks(scene: Scene) -> Outcomes:
    """A disk full in the middle of a run, one that may no longer be written, and one that could not from the start."""
    for number, what in enumerate(("the disk full", "the directory unwritable")):
        place = scene.place / f"disk-{number}"
        with Disk(place, "8m") as disk:
            yield what, _without_room(scene, disk, place, number == 0)
    place = scene.place / "never"
    with Disk(place, "8m") as disk:
        disk.make_read_only()
        started = scene.start("never", sections={"output": str(place / "runs")}, prefix=disk.prefix)
        told = started.wait()
        ok = started.codes == [2] and clear(told)
        yield "read-only from the start", {"exit code": started.codes[0], "last line": _last(told), "ok": ok}


def _without_room(scene: Scene, disk: Disk, place: Path, full: bool) -> dict[str, Any]:
    name, runs = place.name, disk.seen / "runs"
    sections = {"output": str(place / "runs")}
    started = scene.start(name, sections=sections, prefix=disk.prefix)
    scene.until_step(started, name, STEPS // 4, runs)
    started.send(signal.SIGSTOP)  # or so short a run might be over before the disk is
    kept = runs / name / "checkpoints"
    disk.fill() if full else kept.chmod(0o555)
    cure = disk.empty if full else functools.partial(kept.chmod, 0o755)
    started.send(signal.SIGCONT)
    told, code = started.wait(), started.codes[0]
    whole = bool(scene.checkpoints(name, runs))
    cure()
    scene.finish(name, sections=sections, prefix=disk.prefix)
    good = code == 2 and clear(told) and whole
    same = scene.outcome(name, runs) == undisturbed(scene)
    said = [line for line in told.splitlines() if "could not be written" in line]
    return {"exit code": code, "said": said[0][-120:] if said else "", "same": same, "ok": good and same}


def vanished(scene: Scene) -> Outcomes:
    """The directory of a run taken away under it."""
    started = scene.start("vanished")
    scene.until_step(started, "vanished", 2 * EVERY)
    (scene.runs / "vanished").rename(scene.runs / "elsewhere")
    told = started.wait()
    (scene.runs / "elsewhere").rename(scene.runs / "back")
    shutil.rmtree(scene.runs / "vanished", ignore_errors=True)  # what may have been made anew
    (scene.runs / "back").rename(scene.runs / "vanished")
    scene.finish("vanished")
    same = scene.outcome("vanished") == undisturbed(scene)
    ok = started.codes == [2] and clear(told) and same
    yield "the directory gone", {"exit code": started.codes[0], "last line": _last(told), "same": same, "ok": ok}


# ------------------------------------------------------------------ processes


def lost(scene: Scene) -> Outcomes:
    """One of two processes killed or frozen, between checkpoints or while one is written: the other must end by itself
    and name it, and all goes on with as many or with one."""
    for number, victim, moment in itertools.product(
        ("SIGKILL", "SIGSTOP"), (0, 1), ("", " while a checkpoint is written")
    ):
        name = f"lost-{number.lower()}-{victim}-{len(moment)}"
        started = scene.start(name, 2)
        scene.until_step(started, name, STEPS // 4)
        if moment:
            kept = scene.runs / name / "checkpoints"
            started.until(lambda kept=kept: any(kept.glob(WRITTEN)))
        started.processes[victim].send_signal(getattr(signal, number))
        began, other = time.monotonic(), started.processes[1 - victim]
        started.until(lambda other=other: other.poll() is not None)
        seconds = time.monotonic() - began
        told = started.told
        started.kill()
        left = 2 if number == "SIGSTOP" else 1
        scene.finish(name, left)
        if left == 2:
            same = scene.outcome(name) == undisturbed(scene, 2)
        else:  # another number of processes adds up in another order
            same = _close(scene.outcome(name)[0], undisturbed(scene, 2)[0])
        named = f"process {victim} of 2" in told
        ok = named and same and other.returncode == 75
        which = f"process {victim} of 2" + (", the coordinator" if victim == 0 else "")
        outcome = {"seconds": round(seconds, 1), "exit code": other.returncode, "named": named, "same": same, "ok": ok}
        yield f"{number} of {which}{moment}; then {left}", outcome


def _close(one: list[tuple[int, float]], other: list[tuple[int, float]]) -> bool:
    return len(one) == len(other) and all(
        a[0] == b[0] and abs(a[1] / b[1] - 1) < 1e-4 for a, b in zip(one, other, strict=True)
    )


def partition(scene: Scene) -> Outcomes:
    """The cable between two hosts cut: each must end by itself and say so, and all goes on elsewhere."""
    with Network() as network:
        started = scene.start_on(network, "cut")
        scene.until_step(started, "cut", STEPS // 4)
        network.cut()
        began = time.monotonic()
        told = started.wait()
        seconds = time.monotonic() - began
    scene.finish("cut", 2)
    same = scene.outcome("cut") == undisturbed(scene, 2)
    ok = started.codes == [75, 75] and clear(told) and same
    found = {"seconds": round(seconds, 1), "exit codes": started.codes, "last line": _last(told), "same": same}
    yield "the network between two hosts cut", {**found, "ok": ok}


def clock(scene: Scene) -> Outcomes:
    """The time of day jumps by a day every ten seconds, forward and back; the run is killed in the middle."""
    folder = scene.place / "clock"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(
        "import time\nreal = time.time\ntime.time = lambda: real() + 86400 * (time.monotonic() // 10 % 2)\n"
    )
    usual = dict(scene.environment)
    path = os.pathsep.join([str(folder), *filter(None, [usual.get("PYTHONPATH")])])
    scene.environment |= {"PYTHONPATH": path}
    _killed(scene, "clock")
    told = scene.finish("clock")
    scene.environment = usual
    same = scene.outcome("clock") == undisturbed(scene)
    yield "the clock jumps by days", {"same": same, "ok": same and "Traceback" not in told}


def second(scene: Scene) -> Outcomes:
    """A second run in the same directory; and one after the first was killed."""
    started = scene.start("twice")
    scene.until_step(started, "twice", 1)
    started.send(signal.SIGSTOP)  # or it might be finished before the other one has begun
    other = scene.start("twice")
    told = other.wait()
    refused = other.codes == [2] and "is in use by" in told
    started.kill()
    scene.finish("twice")
    same = scene.outcome("twice") == undisturbed(scene)
    yield "a second run in the directory", {"refused": refused, "same": same, "ok": refused and same}


# ------------------------------------------------------------------ data and surroundings


def data(scene: Scene) -> Outcomes:
    """A file changed, shortened, gone or added between two runs."""
    _killed(scene, "data")
    file = scene.text / "7.txt"
    before = file.read_bytes()
    new = scene.text / "another.txt"
    ways: dict[str, Callable[[], Any]] = {
        "changed": lambda: file.write_bytes(before.replace(b"bottles", b"glasses", 1)),
        "shortened": lambda: file.write_bytes(before[:-1]),
        "gone": file.unlink,
        "one more": lambda: new.write_bytes(b"new"),
    }
    for what, change in ways.items():
        change()
        started = scene.start("data")
        told = started.wait()
        file.write_bytes(before)
        new.unlink(missing_ok=True)
        ok = started.codes == [2] and clear(told) and "have changed" in told
        yield f"a data file between two runs: {what}", {"exit code": started.codes[0], "ok": ok}
    scene.finish("data")
    same = scene.outcome("data") == undisturbed(scene)
    yield "the data as it was", {"same": same, "ok": same}


def surroundings(scene: Scene) -> Outcomes:
    """No locale, no home, no terminal, names with spaces and of other scripts; stopped and gone on with."""
    place = scene.place / "an odd  place, größer 日本"
    place.mkdir()
    text = place / "the text"
    shutil.copytree(scene.text, text)
    usual = dict(scene.environment)
    for name in ("HOME", "LANG", "USER", "LOGNAME", "XDG_CACHE_HOME", "TERM"):
        scene.environment.pop(name, None)
    scene.environment |= {"LC_ALL": "C", "TZ": "Pacific/Apia"}
    options = {"sections": {"name": "odd", "output": str(place / "läufe"), "data": {"path": str(text)}}}
    started = scene.start("odd", **options)
    runs = place / "läufe"
    scene.until_step(started, "odd", STEPS // 3, runs)
    started.send(signal.SIGTERM)
    told = started.wait()
    told += scene.finish("odd", **options)
    scene.environment = usual
    same = scene.outcome("odd", runs) == undisturbed(scene)
    ok = same and "Traceback" not in told and "SIGTERM: finishing" in told
    yield "LC_ALL=C, no HOME, no terminal, an odd path", {"same": same, "last line": ascii(_last(told)), "ok": ok}


def _done(outcomes: Outcomes, name: str) -> Outcomes:
    try:
        yield from outcomes
    except StuckError as error:
        yield name, {"said": str(error), "ok": False}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    faults: dict[str, Callable[[Scene], Outcomes]] = {
        "kills": lambda scene: kills(scene, args.n, args.seed),
        **dict.fromkeys(CONFIGS, lambda scene: kills(scene, args.n, args.seed)),
        "kills-2": lambda scene: kills(scene, args.n, args.seed, processes=2),
        "damages": damages,
        "all-damaged": all_damaged,
        "disks": disks,
        "vanished": vanished,
        "lost": lost,
        "partition": partition,
        "clock": clock,
        "second": second,
        "data": data,
        "surroundings": surroundings,
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
        usual = Scene(Path(folder, "usual"), CONFIG)
        for name in args.names or faults:
            scene = Scene(Path(folder, name), CONFIGS[name]) if name in CONFIGS else usual
            for what, outcome in _done(faults[name](scene), name):
                found[f"{name}: {what}" if name in CONFIGS else what] = outcome
                print(f"{what}: {json.dumps(outcome)}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    return int(not all(outcome["ok"] for outcome in found.values()))


if __name__ == "__main__":
    sys.exit(main())
