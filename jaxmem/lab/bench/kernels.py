"""How fast the kernels are on this device, compared with peers, and whether they are right.

Each shape is measured in a process of its own, where there is a GPU (`apart.py`; `measure.py` has what is done in it);
a contestant that hangs or ends its process is left out of the rest. On a CPU everything runs here, on shapes of some
dozen numbers: that shows that the benchmark works, but no speed.
"""

import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from jaxmem.errors import UserError, nearest
from jaxmem.lab.bench import apart, measure
from jaxmem.lab.bench.contest import Row
from jaxmem.lab.bench.measure import BenchSelection, Job, measured
from jaxmem.lab.bench.operations import OPERATIONS, choice_for
from jaxmem.lab.bench.torch_kernels import PEERS
from jaxmem.lab.bench.work import BenchOperation
from jaxmem.machine import devices


def bench_kernels(selection: BenchSelection, *, check: bool = False, write: Path | None = None) -> Iterator[Row]:
    """The device, then each row when it is known, by default of attention. `check`: only whether results are right,
    with every option. `write`: a file to which each row is added at once, as a line of JSON."""
    operation = selection.operation or "attention"
    own = check_selection(operation, selection)
    if write is not None:
        check_file(write)
    here = device_row()
    shapes = selection.shapes or own.usual or own.shapes
    jobs = (Job(operation, name, selection, here["dry_run"], check) for name in shapes)
    for row in itertools.chain([here], run_jobs(measured, jobs, list(selection.without), here)):
        if write is not None:
            with write.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row, allow_nan=False) + "\n")
        yield row


def explain(selection: BenchSelection) -> list[Row]:
    """For each operation and shape the implementation that is chosen on this device, and why."""
    rows = []
    for operation in [selection.operation] if selection.operation else OPERATIONS:
        own = check_selection(operation, selection)
        for name in selection.shapes or own.shapes:
            choice = choice_for(operation, name)
            rows.append(
                {"operation": operation, "shape": name, "implementation": choice.implementation, "why": choice.why}
            )
    return rows


def device_row() -> Row:
    """`measure.where`, for a GPU in a process that ends, because jax would keep most of its memory."""
    here = next(apart.rows(measure.where, None, without=[], limit=apart.LIMIT if devices.has_nvidia_gpu() else None))
    if "why_not" in here:
        raise UserError(f"bench: {here['why_not']}")
    return here


def run_jobs(work: apart.Work, jobs: Iterable[Job], without: list[str], here: Row) -> Iterator[Row]:
    """Each job in a process of its own; on a CPU in this one. A job is made when those before it are done."""
    limit = None if here["dry_run"] else apart.LIMIT
    for job in jobs:
        for row in apart.rows(work, job, without=without, limit=limit):
            yield {"operation": job.operation, "shape": job.shape} | row


def check_file(path: Path) -> None:
    if not path.absolute().parent.is_dir():
        raise UserError(f"--write {path}: there is no folder {path.parent}")
    if path.is_dir():
        raise UserError(f"--write {path}: is a folder; use the name of a file")


def check_selection(operation: str, selection: BenchSelection) -> BenchOperation:
    """The operation, if everything selected exists: contestants, words with which some begin, or a contestant and its
    pass."""
    if operation not in OPERATIONS:
        raise _unknown("operation", operation, OPERATIONS)
    own = OPERATIONS[operation]
    for name in selection.shapes:
        if name not in own.shapes:
            raise _unknown("shape", name, own.shapes)
    contestants = [*own.implementations, *own.others, *PEERS.get(operation, ())]
    known = [name for one in contestants for name in (one, *(f"{one} {of}" for of in own.passes))]
    for name in (*selection.only, *selection.without):
        if not any(f"{one} ".startswith(f"{name} ") for one in known):
            raise _unknown("contestant", name, contestants)
    for name in selection.passes:
        if name not in own.passes:
            raise _unknown("pass", name, own.passes)
    return own


def _unknown(kind: str, name: str, known: Iterable[str]) -> UserError:
    return UserError(f"unknown {kind} {name!r}{nearest(name, known)}")
