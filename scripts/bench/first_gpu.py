"""Measures what the project plans and claims for GPUs on the first GPU of this machine, in 25 minutes.

    python scripts/bench/first_gpu.py                 # all parts; the same command again goes on where it stopped
    python scripts/bench/first_gpu.py steps claims    # these parts
    python scripts/bench/first_gpu.py --report        # the results so far, as Markdown

Parts: `kernels` (each implementation for this GPU: right, and how fast beside cuDNN), `steps` (planned beside measured
bytes and seconds), `torch` (attention and a training step by torch), `claims` (whole models in the memory that we name
for them), `chat` (SmolLM2-135M). Each measurement runs in a process of its own with a limit of time, and is written to
a file of JSON at once. On a machine without a GPU all sizes are tiny: that tests this program; its speeds mean nothing.
"""

import argparse
import datetime as dt
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

sys.path.append(str(Path(__file__).parents[2]))

from jaxmem.config.load import read_config
from jaxmem.machine import devices
from jaxmem.typing import JsonView
from scripts import chat
from scripts.bench.contest import ROOT, Row, program_rows
from scripts.bench.kernels import PACKAGES
from scripts.bench.operations import PAPER_SHAPES
from scripts.bench.steps import STEPS
from scripts.course.table import Table, gib

SETTINGS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
PARTS = ("kernels", "steps", "claims", "torch", "chat")
KERNELS = ("attention", "adam8_update", "int8_add")  # operations that `auto` chooses kernels for
CLAIM_STEPS = 10
# Overrides of every step: its data is not read, and the first updates are not small.
UNREAD = ("data.source=tokens", "data.path=unused", "optimizer.warmup=0", "train.steps=100", "train.tokens=null")


@dataclass(frozen=True)
class Measurement:
    """`run(seconds)` returns rows within these seconds. A row with `error` says why it has no result."""

    part: str
    name: str
    seconds: float
    run: Callable[[float], list[Row]]


def measurements(smollm2: Path | None, *, tiny: bool) -> Iterator[Measurement]:
    """All measurements, the most wanted first."""
    for operation in KERNELS:
        yield Measurement("kernels", f"{operation}-results", 120, kernel_rows(operation, "--check"))
    for name, step in SETTINGS["steps"].items():
        yield Measurement("steps", name, 120, step_rows(name, {}, overrides_of(step, tiny=tiny), STEPS, tiny=tiny))
    for name, claim in SETTINGS["claims"].items():
        config = read_config(ROOT / f"configs/{name}.yaml")
        small = SETTINGS["tiny"].split() if tiny else []
        yield Measurement("claims", name, claim["seconds"], step_rows(name, config, small, CLAIM_STEPS, tiny=tiny))
    for shape in PAPER_SHAPES:
        slow = ("--without", "reference", "--without", "jax.nn xla")
        rows = kernel_rows("attention", shape, *slow, "--seconds", "2")
        yield Measurement("kernels", f"attention-{shape}", 60, rows)
    for operation in KERNELS[1:]:
        yield Measurement("kernels", operation, 60, kernel_rows(operation, "--seconds", "2"))
    for what in ("attention", "step"):
        yield Measurement("torch", what, 150, program_rows("torch_peer", what, *(["--tiny"] if tiny else [])))
    model = smollm2 or chat.FOLDER / chat.FILE
    config = chat.SETTINGS | {"model": {"hf": str(model.resolve())}}
    yield Measurement("chat", "smollm2-135m-qlora", 120, step_rows("smollm2", config, [], STEPS, tiny=tiny))


def overrides_of(step: Mapping[str, str], *, tiny: bool) -> list[str]:
    texts = [SETTINGS["models"][step["model"]], step.get("set", "")]
    texts += [SETTINGS["tiny"], step.get("tiny", "")] if tiny else []
    return " ".join(texts).split()


def step_rows(
    name: str, config: JsonView, overrides: Sequence[str], steps: int, *, tiny: bool
) -> Callable[[float], list[Row]]:
    raw = {**read_config(config, [*UNREAD, *overrides]), "name": name}
    devices_here = ("--simulate", "1") if tiny else ()
    return program_rows("steps", "--steps", str(steps), *devices_here, text=json.dumps(raw))


def kernel_rows(operation: str, *arguments: str) -> Callable[[float], list[Row]]:
    return program_rows("kernels", "--operation", operation, *arguments)


# ---------------------------------------------------------------- the program


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--output", type=Path, default=Path("runs/first-gpu"), metavar="DIR")
    parser.add_argument("--minutes", type=float, default=25.0, help="time after which nothing is started (default: 25)")
    parser.add_argument("--smollm2", type=Path, metavar="FILE", help="the GGUF file that `make chat` downloads")
    parser.add_argument("--report", action="store_true", help="print the results in DIR as Markdown")
    options = parser.parse_args(arguments)
    if unknown := [part for part in options.parts if part not in PARTS]:
        parser.error(f"unknown part {unknown[0]}; expected {', '.join(PARTS)}")
    if options.report:
        print(report(options.output))
        return 0
    here = this_machine()
    options.output.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * options.minutes
    for measurement in measurements(options.smollm2, tiny=here["gpus"] == []):
        file = options.output / f"{measurement.part}-{measurement.name}.json"
        if (options.parts and measurement.part not in options.parts) or file.exists():
            continue
        seconds = min(measurement.seconds, end - time.monotonic())
        start = time.monotonic()
        rows = measurement.run(seconds) if seconds > 0 else [{"error": "not started"}]
        why = next((row["error"] for row in rows if "error" in row), "measured")
        if why != "measured" and seconds < measurement.seconds:  # the next call has the time for it
            print("out of time; the same command goes on", file=sys.stderr)
            return 1
        took = time.monotonic() - start
        write(file, here | {"part": measurement.part, "name": measurement.name, "took": took, "rows": rows})
        print(f"{measurement.part:8} {measurement.name:28} {took:4.0f} s  {why}", file=sys.stderr, flush=True)
    return 0


def this_machine() -> Row:
    """The device and the software, as every file names them."""
    gpus = devices.nvidia_gpus() if devices.has_nvidia_gpu() else []
    git = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+"]
    commit = (
        subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() if shutil.which("git") else ""
    )
    return {
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "device": gpus[0]["name"] if gpus else "cpu",
        "driver": gpus[0]["driver"] if gpus else None,
        "gpus": gpus,
        "versions": devices.package_versions(("flax", "optax", "torch", *PACKAGES)),
        "commit": commit or None,
    }


def write(file: Path, content: Row) -> None:
    part = file.with_suffix(".part")
    part.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    part.rename(file)


# ---------------------------------------------------------------- the results as Markdown


def report(folder: Path) -> str:
    files = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.json"))]
    if not files:
        raise SystemExit(
            f"error: {folder} has no results; `python scripts/bench/first_gpu.py --output {folder}` makes them"
        )
    rows = {(file["part"], file["name"]): file["rows"] for file in files}
    steps = {name: measured[0] for (part, name), measured in rows.items() if part in ("steps", "claims", "chat")}
    tables = [
        [step_row(name, row) for name, row in steps.items()],
        list(cost_rows(steps)),
        list(claim_rows(steps)),
        list(attention_rows(rows)),
        list(wrong_results(rows)),
    ]
    first = files[0]
    head = f"{first['device']}, driver {first['driver']}, jax {first['versions']['jax']}, {first['date'][:10]}"
    return "\n\n".join([head, *(Table("", table).markdown() for table in tables if table)])


def step_row(name: str, row: Row) -> Row:
    """Planned beside measured."""
    planned, measured, planned_seconds, seconds, mfu = (
        row.get(key) for key in ("planned", "measured", "planned_seconds", "seconds", "mfu")
    )
    return {
        "step": name,
        "planned, GiB": gib(planned),
        "measured, GiB": gib(measured),
        "GiB, %": percent(measured, planned),
        "planned, s": planned_seconds,
        "measured, s": seconds,
        "s, %": percent(seconds, planned_seconds),
        "tokens per second": row.get("tokens_per_second"),
        "MFU, %": 100 * mfu if mfu else None,
        "why not": row.get("error"),
    }


def percent(value: float | None, of: float | None) -> float | None:
    """How much a value is above another."""
    return 100 * (value / of - 1) if value and of else None


def cost_rows(steps: Mapping[str, Row]) -> Iterator[Row]:
    """What a memory saver costs in time, and what it saves."""
    for name, pair in SETTINGS["costs"].items():
        saver, without = (steps.get(step, {}) for step in pair)
        if "seconds" in saver and "seconds" in without:
            bytes_more = percent(saver["measured"], without["measured"])
            yield {"cost of": name, "time, %": percent(saver["seconds"], without["seconds"]), "memory, %": bytes_more}


def claim_rows(steps: Mapping[str, Row]) -> Iterator[Row]:
    """Whether a whole model stays within its memory, and its loss falls."""
    for name, claim in SETTINGS["claims"].items():
        if "losses" in (row := steps.get(name, {})):
            is_held = row["measured"] is not None and row["measured"] <= claim["gib"] * 2**30
            first, *_, last = row["losses"]
            yield {
                "claim": f"{name} within {claim['gib']} GiB",
                "measured, GiB": gib(row["measured"]),
                "first loss": first,
                "last loss": last,
                "held": "yes" if is_held and last < first else "no",
            }


def attention_rows(rows: Mapping[tuple[str, str], list[Row]]) -> Iterator[Row]:
    """TFLOP/s of each implementation of attention, ours and torch's."""
    timed = [
        row for measured in rows.values() for row in measured if "rate" in row and row.get("shape") in PAPER_SHAPES
    ]
    names = list(dict.fromkeys(row["contestant"] for row in timed if row["pass"] in ("forward", "backward")))
    for shape in PAPER_SHAPES:
        for of in ("forward", "backward"):
            rates = {row["contestant"]: row["rate"] for row in timed if (row["shape"], row["pass"]) == (shape, of)}
            if rates:
                yield {"attention, TFLOP/s": f"{shape} {of}"} | {name: rates.get(name) for name in names}


def wrong_results(rows: Mapping[tuple[str, str], list[Row]]) -> Iterator[Row]:
    for (part, _), measured in rows.items():
        for row in measured if part == "kernels" else ():
            if row.get("right") is False:
                what = f"{row['operation']}, {row['contestant']} {row['pass']}"
                yield {"wrong result": what, "check": row.get("check"), "error in steps": row["error"]}


if __name__ == "__main__":
    sys.exit(main())
