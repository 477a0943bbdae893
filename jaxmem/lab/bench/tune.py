"""Measures the fastest implementation of each operation, and writes a table: for each default shape, the correct
implementation with the smallest sum of times over all passes."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxmem.errors import UserError
from jaxmem.lab.bench import kernels
from jaxmem.lab.bench.contest import Row, Say
from jaxmem.lab.bench.kernels import BenchSelection, Job, measured
from jaxmem.lab.bench.operations import OPERATIONS, choice_for
from jaxmem.lab.bench.work import BenchOperation


def tune(path: Path, selection: BenchSelection, *, again: bool = False) -> Iterator[Row]:
    """Measures, and writes each fastest implementation at once into the entries of this kind of device. Existing
    entries are measured again only with `again`. On a CPU this is a dry run on a tiny shape."""
    table = _table(path)
    operation = selection.operation
    if operation is not None:
        kernels.check_selection(operation, selection)
    elif named := selection.shapes + selection.only:
        raise UserError(f"bench tune: {', '.join(named)} requires --operation; add --operation NAME")
    here = kernels.device_row()
    kind, left_out = here["device"], list(selection.without)
    for name in [operation] if operation else OPERATIONS:
        own = OPERATIONS[name]
        usual = own.usual or tuple(own.shapes)
        known = [] if again else [*table.get(name, {}).get(kind, [])]
        jobs = (
            Job(name, shape, selection, here["dry_run"], known=tuple(known))
            for shape in selection.shapes or (usual[:1] if here["dry_run"] else usual)
        )
        for row in kernels.run_jobs(tune_shape, jobs, [*left_out, *own.others], here):
            if "implementation" in row:
                entry = {key: value for key, value in row.items() if key not in ("operation", "shape")}
                known.append(entry)
                _store(path, table, name, kind, entry)
            yield row


def tune_shape(job: Job, *, done: Sequence[Row], without: Sequence[str], say: Say) -> Iterator[Row]:
    """The measured rows, then the entry of the fastest implementation."""
    choice = choice_for(job.operation, job.shape)
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
    """The implementation with the smallest sum of times over all passes. The reference needs the most memory, so it
    is considered only for operations whose plain JAX implementation it is."""
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
        raise UserError(f"{path} is not a table of bench tune; use a table that bench tune wrote, or a new file")
    return found


def _store(path: Path, table: dict[str, Any], name: str, kind: str, row: Row) -> None:
    """Replaces the entry for calls of this kind and these sizes. The file is replaced atomically."""
    entries = table.setdefault(name, {}).setdefault(kind, [])
    others = [entry for entry in entries if (entry["kind"], entry["sizes"]) != (row["kind"], row["sizes"])]
    table[name][kind] = [*others, row]
    new = path.with_name(f"{path.name}.new")
    new.write_text(json.dumps(table, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    new.replace(path)
