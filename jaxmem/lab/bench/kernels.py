"""How fast the kernels are on this device, beside peers, and whether they are right.

Each shape is measured in a process of its own, where there is a GPU (`apart.py`; `measure.py` says what is done in it);
what hangs or ends its process is left out of the rest. On a CPU everything runs here, on shapes of some dozen numbers:
that shows that the benchmark works, and no speed.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from jaxmem.errors import UserError, nearest
from jaxmem.lab.bench import apart, measure, operations
from jaxmem.lab.bench.contest import Row
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
    """The device, then each row when it is known: of these shapes of an operation, or its usual ones, for about so many
    seconds each. `write`: a file to which each row is added at once, as a line of JSON."""
    shapes = check_shapes(operation, names)
    check_contestants(operation, [*only, *without])
    if write is not None:
        check_file(write)
    here, left_out = device_row(), list(without)

    jobs = (Job(operation, name, seconds, here["dry_run"], tuple(only), check=check) for name in shapes)
    for row in itertools.chain([here], run_jobs(measured, jobs, left_out, here)):
        if write is not None:
            with write.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row, allow_nan=False) + "\n")
        yield row


def explain(names: Sequence[str], *, operation: str | None = None) -> list[Row]:
    """For each operation and shape the implementation that is chosen on this device, and why."""
    return [
        {"operation": one, "shape": name, "implementation": choice.implementation, "why": choice.why}
        for one in ([operation] if operation else OPERATIONS)
        for name in (check_shapes(one, names) if names else find_operation(one).shapes)
        for choice in [operations.choice_for(one, name)]
    ]


def device_row() -> Row:
    """A GPU is only asked in a process that ends: it takes most of the memory for itself."""
    here = next(apart.rows(measure.where, None, without=[], limit=apart.LIMIT if devices.has_nvidia_gpu() else None))
    if "why_not" in here:
        raise UserError(f"bench: {here['why_not']}")
    return here


def run_jobs(work: apart.Work, jobs: Iterable[Job], without: list[str], here: Row) -> Iterator[Row]:
    """Each job in a process of its own, in this one on a CPU. A job is made when those before it are done."""
    limit = None if here["dry_run"] else apart.LIMIT
    for job in jobs:
        for row in apart.rows(work, job, without=without, limit=limit):
            yield {"operation": job.operation, "shape": job.shape} | row


def check_file(path: Path) -> None:
    if not path.absolute().parent.is_dir():
        raise UserError(f"--write {path}: there is no folder {path.parent}")
    if path.is_dir():
        raise UserError(f"--write {path}: is a folder; it should be a file")


def check_contestants(operation: str, names: Sequence[str], passes: Sequence[str] = ()) -> None:
    """Each of `names` is a contestant, words that some begin with, or a contestant and its pass."""
    own = find_operation(operation)
    contestants = [*own.implementations, *own.beside, *own.peers]
    known = [name for one in contestants for name in (one, *(f"{one} {of}" for of in own.passes))]
    for name in names:
        if not any(f"{one} ".startswith(f"{name} ") for one in known):
            raise UserError(f"no contestant {name!r}{nearest(name, contestants)}")
    for of in passes:
        if of not in own.passes:
            raise UserError(f"no pass {of!r}{nearest(of, own.passes)}")


def check_shapes(operation: str, names: Sequence[str]) -> Sequence[str]:
    """These shapes, or the operation's usual ones."""
    own = find_operation(operation)
    for name in names:
        if name not in own.shapes:
            raise UserError(f"no shape {name!r}{nearest(name, own.shapes)}; there are {', '.join(own.shapes)}")
    return list(names) or own.usual or list(own.shapes)


def find_operation(name: str) -> Operation:
    if name not in OPERATIONS:
        raise UserError(f"no operation {name!r}{nearest(name, OPERATIONS)}; there are {', '.join(OPERATIONS)}")
    return OPERATIONS[name]
