"""Measures the fastest block sizes of each kernel, then the fastest implementation of each operation, into a table.

Block sizes: all that fit on the GPU; each is checked, then timed in alternating bursts. Implementations: with these
block sizes, the correct one with the smallest sum of times over all passes."""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxmem.errors import UserError
from jaxmem.kernels import tuning
from jaxmem.kernels.choice import use_table
from jaxmem.lab.bench import kernels, operations
from jaxmem.lab.bench.contest import RIGHT, Contestant, Row, Say, take_turns
from jaxmem.lab.bench.kernels import BenchSelection, Job, measured
from jaxmem.lab.bench.operations import OPERATIONS
from jaxmem.lab.bench.work import BenchOperation, BenchPass, BenchWork

DRY_SIZES = 2  # block sizes of a dry run


def tune(path: Path, selection: BenchSelection, *, again: bool = False) -> Iterator[Row]:
    """Measures, and writes each winner at once into the entries of this kind of device. If contestants or passes are
    selected, only their block sizes are tuned. Entries that the table has are measured again only with `again`. On a
    CPU this is a dry run on tiny shapes."""
    table = _table(path)
    operation, only_blocks = selection.operation, selection.only + selection.passes
    if operation is not None:
        kernels.check_selection(operation, selection)
    elif selection.shapes + only_blocks:
        raise UserError(f"bench tune: {', '.join(selection.shapes + only_blocks)}: --operation is missing; add it")
    here = kernels.device_row()
    dry, kind, left_out = here["dry_run"], here["device"], list(selection.without)
    for one in [operation] if operation else OPERATIONS:
        own = OPERATIONS[one]
        works = [(tune_blocks, own.tuned, tuning.table(one))]
        if not only_blocks:
            works.append((tune_implementations, own.usual or tuple(own.shapes), one))
        for work, usual, place in works:
            known = [] if again else [*table.get(place, {}).get(kind, [])]
            jobs = (
                Job(one, name, selection, dry, peers=False, known=tuple(known), table=table)
                for name in selection.shapes or (usual[:1] if dry else usual)
            )
            for row in kernels.run_jobs(work, jobs, left_out, here):
                if "kind" in row:
                    entry = {key: value for key, value in row.items() if key not in ("operation", "shape")}
                    known.append(entry)
                    _store(path, table, place, kind, entry)
                yield row


def tune_blocks(job: Job, *, done: Sequence[Row], without: Sequence[str], say: Say) -> Iterator[Row]:
    """The entries of the table: one for each kernel that has block sizes and runs here."""
    own = OPERATIONS[job.operation]
    capability = getattr(jax.devices()[0], "compute_capability", "")
    shared = tuning.SHARED.get(capability, min(tuning.SHARED.values()))
    known = {(entry["kind"], tuple(entry["sizes"])) for entry in (*job.known, *done)}
    work = own.work(job.sizes)
    for of, one in (work.kernels or work.passes).items():
        expected: list[Any] = []  # computed once, if needed
        for implementation in own.implementations:
            kernel = f"{implementation} {of}"
            is_tuned = not job.selection.passes or of in job.selection.passes
            if not is_tuned or not job.selection.has(implementation, of, without):
                continue
            call = _called_kernels(one, implementation, work).get(kernel)
            if call is None or (f"{kernel} {call.kind}", tuple(call.sizes)) in known:
                continue
            space = [blocks for blocks in call.space(shared) if BenchSelection().has(kernel, _name(blocks), without)]
            if not expected:
                say(f"plain {of}")
                expected.append(one.expected(work))
            contestants = list(_correct(kernel, one, work, expected[0], space[:DRY_SIZES] if job.dry else space, say))
            take_turns(contestants, job.selection.seconds, say)
            seconds = {contestant.of: min(contestant.seconds) for contestant in contestants if not contestant.failed}
            if seconds:
                best = min(seconds, key=lambda blocks: seconds[blocks])
                yield {
                    "kind": f"{kernel} {call.kind}",
                    "sizes": list(call.sizes),
                    "blocks": [int(size) for size in best.split("x")],
                    "of": len(seconds),
                    "milliseconds": 1e3 * seconds[best],
                }


def _called_kernels(one: BenchPass, implementation: str, work: BenchWork) -> dict[str, tuning.KernelCall]:
    """The kernels that a pass of an implementation calls; {} if it does not support the shape."""
    with tuning.record_calls() as recorded:
        try:
            one.traced(implementation, work)
        except Exception:  # noqa: BLE001 (reported where the implementation is measured)
            return {}
    return recorded


def _correct(
    kernel: str, one: BenchPass, work: BenchWork, expected: Any, space: Iterable[tuple[int, ...]], say: Say
) -> Iterator[Contestant]:
    """The block sizes that compile and compute the correct result."""
    for blocks in space:
        say(f"{kernel} {_name(blocks)}")
        try:
            with tuning.force_blocks(kernel, blocks):
                call = one.compiled(kernel.split(maxsplit=1)[0], work)
            error = one.far(call(), expected)
        except Exception:  # noqa: BLE001, S112 (of many sizes some do not compile)
            continue
        if error <= RIGHT:
            yield Contestant(kernel, _name(blocks), call)


def _name(blocks: tuple[int, ...]) -> str:
    return "x".join(map(str, blocks))


def tune_implementations(job: Job, *, done: Sequence[Row], without: Sequence[str], say: Say) -> Iterator[Row]:
    """The measured rows, then the entry of the winner."""
    with use_table(dict(job.table)):
        choice = operations.choice_for(job.operation, job.shape)
        call = {"kind": choice.kind, "sizes": list(choice.sizes)}
        if any(call.items() <= entry.items() for entry in job.known):
            return
        rows = []
        for row in measured(job, done=done, without=without, say=say):
            rows.append(row)
            yield row
    if (winner := fastest(OPERATIONS[job.operation], rows)) is not None:
        yield call | winner


def fastest(own: BenchOperation, rows: Sequence[Row]) -> Row | None:
    """The implementation with the smallest sum of times over all passes. The reference, which needs the most memory,
    wins only if it is the plain JAX implementation."""
    timed = [row for row in rows if "milliseconds" in row and row["contestant"] in own.implementations]
    passes = {row["pass"] for row in timed}
    taken: dict[str, dict[str, float]] = {}
    for row in timed:
        if row["right"]:
            taken.setdefault(row["contestant"], {})[row["pass"]] = row["milliseconds"]
    totals = {name: sum(each.values()) for name, each in taken.items() if set(each) == passes}
    if own.plain != "reference" and len(totals) > 1:
        totals.pop("reference", None)
    if not totals:
        return None
    return {"implementation": min(totals, key=lambda name: totals[name]), "milliseconds": totals}


def _table(path: Path) -> dict[str, Any]:
    kernels.check_file(path)
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}); use a table that bench tune wrote, or a new file") from error
    if not isinstance(found, dict):
        raise UserError(f"{path} is not a table of bench tune; use one that it wrote, or a new file")
    return found


def _store(path: Path, table: dict[str, Any], name: str, kind: str, row: Row) -> None:
    """Replaces the entry of the same calls, by writing a complete new file that replaces the old one."""
    entries = table.setdefault(name, {}).setdefault(kind, [])
    others = [entry for entry in entries if (entry["kind"], entry["sizes"]) != (row["kind"], row["sizes"])]
    table[name][kind] = [*others, row]
    new = path.with_name(f"{path.name}.new")
    new.write_text(json.dumps(table, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    new.replace(path)
