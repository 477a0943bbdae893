"""How fast the kernels are on this device, beside peers, and whether they are right.

Each shape is measured in a process of its own, where there is a GPU (`apart.py`; `measure.py` says what is done in it);
what hangs or ends its process is left out of the rest. On a CPU everything runs here, on shapes cut down to some dozen
numbers: that shows that the harness works, and no speed.

`tune` keeps the fastest: of each kernel the block sizes, then of each operation and shape the implementation that takes
the least time for all passes together, among those that are right. `explain` gives what is chosen where none is named,
and why.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxmem.errors import UserError, nearest
from jaxmem.kernels import tuning
from jaxmem.kernels.choice import use_table
from jaxmem.lab.bench import apart, blocks, measure, operations
from jaxmem.lab.bench.contest import Row, Say
from jaxmem.lab.bench.measure import Job, measured
from jaxmem.lab.bench.operations import OPERATIONS
from jaxmem.lab.bench.work import Operation
from jaxmem.machine import devices


def bench_kernels(
    names: Sequence[str],
    *,
    operation: str = "attention",
    seconds: float = 5.0,
    check: bool = False,
    only: Sequence[str] = (),
    without: Sequence[str] = (),
    write: Path | None = None,
) -> Iterator[Row]:
    """What is measured on, then each row when it is known: of these shapes of an operation, or its usual ones, for
    about so many seconds each. `write`: a file to which each is added at once, as a line of JSON."""
    shapes = _shapes(names, operation)
    _check_contestants(operation, [*only, *without])
    if write is not None:
        _check_place(write)
    for row in _rows(shapes, operation, seconds, check, only, without):
        if write is not None:
            with write.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row, allow_nan=False) + "\n")
        yield row


def _rows(
    shapes: Sequence[str], operation: str, seconds: float, check: bool, only: Sequence[str], without: Sequence[str]
) -> Iterator[Row]:
    here = _here()
    yield here
    left_out = list(without)
    for name in shapes:
        job = Job(operation, name, seconds, here["dry_run"], tuple(only), check)
        for row in apart.rows(measured, job, without=left_out, limit=_limit(here)):
            yield {"operation": operation, "shape": name} | row


def explain(names: Sequence[str], *, operation: str | None = None) -> list[Row]:
    """For each operation and shape what is picked on this device, and why."""
    return [
        {"operation": one, "shape": name, "implementation": choice.implementation, "why": choice.why}
        for one in ([operation] if operation else OPERATIONS)
        for name in (_shapes(names, one) if names else _known(one).shapes)
        for choice in [operations.choice_for(one, name)]
    ]


def tune(
    path: Path,
    names: Sequence[str] = (),
    *,
    operation: str | None = None,
    seconds: float = 5.0,
    only: Sequence[str] = (),
    without: Sequence[str] = (),
    passes: Sequence[str] = (),
    again: bool = False,
) -> Iterator[Row]:
    """Measures, and writes the winners for this kind of device into a table beside those of others, each at once: how
    each kernel is best cut, then, cut so, which implementation is the fastest. With `only` or `passes` how these are
    cut, and no more. What the table has is not measured, but `again`. On a CPU all of it runs on small shapes, to see
    that it works."""
    table = _table(path)
    if operation is None and (chosen := [*names, *only, *passes]):
        raise UserError(f"bench tune: {', '.join(chosen)}: of which --operation?")
    if operation is not None:
        _shapes(names, operation)
        _check_contestants(operation, [*only, *without], passes)
    here = _here()
    dry, kind, left_out = here["dry_run"], here["device"], list(without)
    for one in [operation] if operation else OPERATIONS:
        own = _known(one)
        jobs = {name: Job(one, name, seconds, dry, tuple(only), peers=False) for name in own.shapes}
        kept = [] if again else [*table.get(tuning.table(one), {}).get(kind, [])]
        for name in _selected(names, own.tuned, dry):
            there = tuple((entry["kind"], tuple(entry["sizes"])) for entry in kept)
            blocks_job = blocks.BlocksJob(jobs[name], tuple(passes), there)
            for row in apart.rows(blocks.tune_blocks, blocks_job, without=left_out, limit=_limit(here)):
                if "kind" in row:
                    kept.append(row)
                    _keep(path, table, tuning.table(one), kind, row)
                yield {"operation": one, "shape": name} | row
        if only or passes:
            continue
        for name in _selected(names, own.usual or tuple(own.shapes), dry):
            match = ImplementationJob(jobs[name], table, again, kind)
            for row in apart.rows(tune_implementations, match, without=left_out, limit=_limit(here)):
                if "kind" in row:
                    _keep(path, table, one, kind, row)
                yield {"operation": one, "shape": name} | row


class ImplementationJob(NamedTuple):
    """Between the implementations of an operation, cut as a table of winners says."""

    job: Job
    table: dict[str, Any]
    again: bool
    device: str


def tune_implementations(
    match: ImplementationJob, *, done: Sequence[Row], without: Sequence[str], say: Say
) -> Iterator[Row]:
    """The rows that were measured, and the winner's entry."""
    job = match.job
    with use_table(match.table):
        choice = operations.choice_for(job.operation, job.shape)
        about = {"kind": choice.kind, "sizes": list(choice.sizes)}
        entries = match.table.get(job.operation, {}).get(match.device, [])
        if not match.again and any(about.items() <= entry.items() for entry in entries):
            return
        rows = []
        for row in measured(job, done=done, without=without, say=say):
            rows.append(row)
            yield row
    if (winner := _fastest(OPERATIONS[job.operation], rows)) is not None:
        yield about | winner


def _fastest(own: Operation, rows: Sequence[Row]) -> Row | None:
    """What takes the least time for all passes together. What holds the most, the reference, only wins where nothing
    else is in plain JAX."""
    timed = [row for row in rows if "milliseconds" in row and row["contestant"] in own.implementations]
    passes = {row["pass"] for row in timed}
    taken: dict[str, dict[str, float]] = {}
    for row in timed:
        if row["right"]:
            taken.setdefault(row["contestant"], {})[row["pass"]] = row["milliseconds"]
    totals = {way: sum(each.values()) for way, each in taken.items() if set(each) == passes}
    if own.plain != "reference" and len(totals) > 1:
        totals.pop("reference", None)
    if not totals:
        return None
    return {"implementation": min(totals, key=lambda way: totals[way]), "milliseconds": totals}


def _here() -> Row:
    """A GPU is only asked in a process that ends: it takes most of the memory for itself."""
    here = next(apart.rows(measure.where, None, without=[], limit=apart.LIMIT if devices.has_nvidia_gpu() else None))
    if "why_not" in here:
        raise UserError(f"bench: {here['why_not']}")
    return here


def _limit(here: Row) -> float | None:
    return None if here["dry_run"] else apart.LIMIT


def _selected(names: Sequence[str], usual: Sequence[str], dry: bool) -> Sequence[str]:
    return list(names) or (usual[:1] if dry else usual)


def _table(path: Path) -> dict[str, Any]:
    _check_place(path)
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(
            f"{path}: is not JSON ({error}); bench tune adds to a table that it wrote, or to none"
        ) from error
    if not isinstance(found, dict):
        raise UserError(
            f"{path}: is no table of winners, by operation; bench tune adds to one that it wrote, or to none"
        )
    return found


def _keep(path: Path, table: dict[str, Any], name: str, kind: str, row: Row) -> None:
    """In the place of one of the same calls. Written beside and moved, so that no half of it is ever there."""
    entries = table.setdefault(name, {}).setdefault(kind, [])
    same = [old for old in entries if (old["kind"], old["sizes"]) == (row["kind"], row["sizes"])]
    table[name][kind] = [entry for entry in entries if entry not in same] + [row]
    beside = path.with_name(f"{path.name}.new")
    beside.write_text(json.dumps(table, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    beside.replace(path)


def _check_place(path: Path) -> None:
    if not path.absolute().parent.is_dir():
        raise UserError(f"--write {path}: there is no folder {path.parent}")
    if path.is_dir():
        raise UserError(f"--write {path}: is a folder; it should be a file")


def _check_contestants(operation: str, names: Sequence[str], passes: Sequence[str] = ()) -> None:
    """Of `names` each is a contestant, words that some begin with, or a contestant and its pass."""
    own = _known(operation)
    contestants = [*own.implementations, *own.beside, *own.peers]
    known = [name for one in contestants for name in (one, *(f"{one} {of}" for of in own.passes))]
    for name in names:
        if not any(f"{one} ".startswith(f"{name} ") for one in known):
            raise UserError(f"no contestant {name!r}{nearest(name, contestants)}")
    for of in passes:
        if of not in own.passes:
            raise UserError(f"no pass {of!r}{nearest(of, own.passes)}")


def _shapes(names: Sequence[str], operation: str) -> Sequence[str]:
    own = _known(operation)
    for name in names:
        if name not in own.shapes:
            raise UserError(f"no shape {name!r}{nearest(name, own.shapes)}; there are {', '.join(own.shapes)}")
    return list(names) or own.usual or list(own.shapes)


def _known(operation: str) -> Operation:
    if operation not in OPERATIONS:
        raise UserError(
            f"no operation {operation!r}{nearest(operation, OPERATIONS)}; there are {', '.join(OPERATIONS)}"
        )
    return OPERATIONS[operation]
