"""The speed of kernels on this device, compared with other implementations, and the errors of their results.

    python scripts/bench/kernels.py long llama3-8b                 # attention, compared with cuDNN
    python scripts/bench/kernels.py --operation adam8_update       # another operation
    python scripts/bench/kernels.py long --check                   # only the results, with every option

`first_gpu.py` measures the same with limits of time, and keeps the rows. Results come first, written to outputs
initialized with NaN, then the times. Each row reports one pass of a contestant as soon as it is known: the check and
its error; then the times, and their ratios to other contestants and to a matmul or copy in the same turns; or the
reason why it has no times. On a CPU all shapes are tiny, which tests the benchmark, but not the speed."""

import argparse
import datetime as dt
import itertools
import statistics
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxmem.errors import UserError, nearest
from jaxmem.machine import devices
from scripts.bench.contest import CEILING, MAX_ERROR, Contestant, Row, ceilings, error_line, take_turns, write_row
from scripts.bench.operations import OPERATIONS, BenchOperation

PACKAGES = (
    *("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12"),
    *("nvidia-cublas", "nvidia-cuda-nvcc", "triton", "jax-triton"),
)


@dataclass(frozen=True)
class BenchSelection:
    """The shapes and contestants that a command measures; (): the default shapes of the operation, all contestants."""

    shapes: tuple[str, ...] = ()
    operation: str = "attention"
    only: tuple[str, ...] = ()  # contestants, or single passes of them
    without: tuple[str, ...] = ()
    seconds: float = 5.0  # approximate time for each shape or kernel

    def has(self, name: str, of: str) -> bool:
        """Whether a contestant's pass is selected. A name selects all names that begin with its words: `jax.nn` also
        selects `jax.nn xla`, and `triton` all passes of triton.

        >>> BenchSelection(without=("jax.nn",)).has("jax.nn xla", "forward")
        False
        >>> BenchSelection(only=("triton forward",)).has("triton", "forward")
        True
        """
        words = f"{name} {of} "
        is_named = not self.only or any(words.startswith(f"{name} ") for name in self.only)
        return is_named and not any(words.startswith(f"{name} ") for name in self.without)


def bench_kernels(selection: BenchSelection, *, check: bool = False) -> Iterator[Row]:
    """The device, then each row as soon as it is known. `check`: only check the results, with every option."""
    operation = check_selection(selection)
    here = device_row()
    yield here
    for name in selection.shapes or operation.usual:
        shape = operation.shape(name, dry=here["dry_run"])
        for row in measured(operation, shape, selection, dry=here["dry_run"], check=check):
            yield {"operation": selection.operation, "shape": name} | row


def check_selection(selection: BenchSelection) -> BenchOperation:
    """The operation; an error if a selected name does not exist."""

    def check(kind: str, names: Iterable[str], known: Collection[str], passes: Collection[str] = ()) -> None:
        for name in names:
            if name not in known and not any(f"{words} ".startswith(f"{name} ") for words in passes):
                raise UserError(f"unknown {kind} {name}{nearest(name, known)}")

    check("operation", [selection.operation], OPERATIONS)
    operation = OPERATIONS[selection.operation]
    passes = [f"{contestant} {of}" for contestant in operation.contestants for of in operation.passes]
    check("shape", selection.shapes, operation.shapes)
    check("contestant", (*selection.only, *selection.without), operation.contestants, passes)
    return operation


def device_row() -> Row:
    """The device, the versions of its software, and the time."""
    device = jax.devices()[0]
    gpus = devices.nvidia_gpus()
    return {
        "device": device.device_kind,
        "dry_run": device.platform == "cpu",
        "time": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "driver": gpus[0]["driver"] if gpus else None,
        "gpus": gpus,
        "versions": devices.package_versions(PACKAGES),
    }


def measured(
    operation: BenchOperation, shape: Any, selection: BenchSelection, *, dry: bool = False, check: bool = False
) -> Iterator[Row]:
    """The errors of all contestants, then their times."""
    checked: list[Row] = []
    for row in _checks(operation, shape, selection, every_option=check):
        checked.append(row)
        yield row
    if check:
        return
    work = operation.work(shape)
    errors = {(row["contestant"], row["pass"]): row for row in checked}
    contestants: list[Contestant] = []
    for name, (of, work_pass) in itertools.product(operation.contestants, work.passes.items()):
        if not selection.has(name, of) or "why_not" in errors.get((name, of), {}):
            continue
        try:
            call = work_pass.compiled(name, work)
        except Exception as error:  # noqa: BLE001 (each compiler has errors of its own)
            yield {"contestant": name, "pass": of, "why_not": error_line(error)}
        else:
            contestants.append(Contestant(name, of, call, work_pass.amount, work.unit))
    limits = {ceiling.unit: ceiling for ceiling in ceilings(256 if dry else 8192)} if contestants else {}
    take_turns([*contestants, *limits.values()], selection.seconds)
    peers = {"reference", operation.plain, *operation.others}
    compared = [contestant for contestant in contestants if contestant.name in peers]
    for contestant in [*contestants, *limits.values()][::-1]:
        error = errors.get((contestant.name, contestant.of), {})
        right = {key: error[key] for key in ("right", "error") if key in error}
        row = {"sizes": shape._asdict(), "contestant": contestant.name, "pass": contestant.of}
        yield row | _times(contestant, compared, limits[contestant.unit]) | right


def _checks(operation: BenchOperation, shape: Any, selection: BenchSelection, *, every_option: bool) -> Iterator[Row]:
    works = operation.checks(shape)
    for check in works if every_option else list(works)[:1]:
        work = works[check]()
        for of, work_pass in work.passes.items():
            names = [name for name in operation.implementations if selection.has(name, of)]
            if not names:
                continue
            expected = work_pass.expected(work)
            for name in names:
                row = {"contestant": name, "pass": of, "check": check}
                try:
                    error = work_pass.error(name, work, expected)
                except Exception as refusal:  # noqa: BLE001 (each compiler has errors of its own)
                    yield row | {"why_not": error_line(refusal)}
                else:
                    yield row | {"right": error <= MAX_ERROR, "error": error if error < float("inf") else None}


def _times(contestant: Contestant, compared: Sequence[Contestant], limit: Contestant) -> Row:
    """The times of a contestant, and their ratios to the same pass of others and to the limit of the device."""
    if contestant.failed is not None:
        return {"why_not": contestant.failed}
    ratios = {
        peer.name: statistics.median(
            theirs / ours for theirs, ours in zip(peer.seconds, contestant.seconds, strict=False)
        )
        for peer in compared
        if peer is not contestant and peer.of == contestant.of and not peer.failed
    }
    if contestant is not limit and limit.failed is None:
        ratios[CEILING] = contestant.rate / limit.rate
    return contestant.times() | {"ratios": ratios}


# ---------------------------------------------------------------- the program


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", metavar="SHAPE", help="such as long or llama3-8b; default: a standard set")
    parser.add_argument("--operation", default="attention", help=f"one of {', '.join(OPERATIONS)}")
    parser.add_argument("--check", action="store_true", help="only check results, with each option of a kernel")
    name = {"action": "append", "default": [], "metavar": "NAME"}
    parser.add_argument("--only", **name, help="measure only this implementation or pass, e.g. 'triton forward'")
    parser.add_argument("--without", **name, help="leave out this implementation or pass, e.g. jax.nn")
    parser.add_argument("--seconds", type=float, default=5.0, help="approximate time per shape")
    parser.add_argument("--rows", type=Path, metavar="FILE", help="also write the rows, a line of JSON each")
    options = parser.parse_args(arguments)
    devices.use_cpu_without_gpu()
    names = (tuple(options.only), tuple(options.without))
    selection = BenchSelection(tuple(options.shapes), options.operation, *names, options.seconds)
    try:
        for row in bench_kernels(selection, check=options.check):
            print(line_of(row), flush=True)
            write_row(options.rows, row)
    except UserError as error:
        sys.exit(f"error: {error}")


def line_of(row: Row) -> str:
    if "operation" not in row:
        dry = ": a dry run on small shapes; its speeds have no meaning" if row["dry_run"] else ""
        driver = "" if row["driver"] is None else f", driver {row['driver']}"
        return f"{row['device']}{driver}, {row['time']}{dry}"
    who = f"{row['operation']:14} {row['shape']:18} {row.get('contestant', ''):14} {row.get('pass', ''):8}"
    return f"{who} {_describe(row)}".rstrip()


def _describe(row: Row) -> str:
    checked = f", {row['check']}" if "check" in row else ""
    if "why_not" in row:
        return f"not{checked}: {row['why_not']}"
    if "rate" not in row:
        error = "infinite" if row["error"] is None else f"{row['error']:.1f} steps"
        return f"{'right' if row['right'] else 'WRONG'}{checked}, error {error}"
    least, most = row["spread"]
    ratios = "".join(f"  {ratio:.2f} x {name}" for name, ratio in row["ratios"].items())
    marks = f"{'' if row.get('right', True) else '  WRONG'}{'  BY HOST' if row['by_host'] else ''}"
    return f"{row['rate']:9.3f} ({least:.3f} to {most:.3f}) {row['unit']}{marks}{ratios}"


if __name__ == "__main__":
    main()
