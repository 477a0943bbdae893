"""How fast the kernels are on this device, beside what else there is, and whether they are right.

Right first: results and gradients of new random inputs against float64, in memory that was filled with NaN before. Then
time: every contestant takes turns, a burst of calls each; medians of the turns. The ceilings are this device's own
matrix product and copy. On a CPU everything runs on shapes cut down to some dozen numbers: that shows that the harness
works, and no speed.

`tune` keeps the winners: of each operation and shape the implementation that takes the least time for all passes
together, among those that are right. `explain` says what is picked without being named, and why.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxmem.bench import attention, blocks, operations
from jaxmem.bench.contest import RIGHT, ceilings, version
from jaxmem.bench.operations import OPERATIONS
from jaxmem.errors import UserError, nearest
from jaxmem.kernels import tuning
from jaxmem.kernels.choice import supplied


def bench_kernels(names: Sequence[str], *, operation: str = "attention", seconds: float = 5.0) -> dict[str, Any]:
    """Each of these shapes of an operation, or its usual ones, for about so many seconds."""
    device = jax.devices()[0]
    dry = device.platform == "cpu"
    rows = [row for name in _shapes(names, operation) for row in _measured(operation, name, seconds, dry)]
    versions = {name: found for peer in ("torch", "bitsandbytes", "torchao") for name, found in version(peer).items()}
    return {
        "device": device.device_kind,
        "dry_run": dry,
        "date": dt.date.today().isoformat(),
        "versions": {"jax": jax.__version__, **versions},
        "ceilings": ceilings(256 if dry else 8192),
        "rows": rows,
    }


def explain(names: Sequence[str], *, operation: str | None = None) -> list[dict[str, Any]]:
    """For each operation and shape what is picked on this device, and why."""
    return [
        {"operation": one, "shape": name, "implementation": choice.implementation, "why": choice.why}
        for one in ([operation] if operation else OPERATIONS)
        for name in (_shapes(names, one) if names else _known(one).shapes)
        for choice in [operations.explained(one, name)]
    ]


def tune(path: Path, *, operation: str | None = None, seconds: float = 5.0) -> dict[str, Any]:
    """Measures, and writes the winners for this kind of device into a table beside those of others: how each kernel is
    best cut, then, cut so, which implementation is the fastest. On a CPU all of it runs on small shapes, to see that it
    works."""
    device = jax.devices()[0]
    dry = device.platform == "cpu"
    table = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for one in [operation] if operation else OPERATIONS:
        own = _known(one)
        found = [
            entry
            for name in (own.tuned[:1] if dry else own.tuned)
            for entry in blocks.winners(operations.tried(one, name, dry=dry), own.implementations, seconds, dry=dry)
        ]
        if found:
            table.setdefault(tuning.table(one), {})[device.device_kind] = found
        with supplied(table):
            won = [_winner(one, name, list(_measured(one, name, seconds, dry))) for name in _some(own.shapes, dry)]
        table.setdefault(one, {})[device.device_kind] = [entry for entry in won if entry]
    path.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    return table


def _some(shapes: Mapping[str, Any], dry: bool) -> Sequence[str]:
    return list(shapes)[:1] if dry else list(shapes)


def _winner(operation: str, name: str, rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    own = OPERATIONS[operation].implementations
    taken: dict[str, float] = {}
    wrong = set()
    for row in rows:
        if "rate" in row and row["contestant"] in own:
            way = row["contestant"]
            taken[way] = taken.get(way, 0.0) + 1 / row["rate"]
            if row["error"] is None or row["error"] > RIGHT:
                wrong.add(way)
    right = {way: total for way, total in taken.items() if way not in wrong}
    if not right:
        return None
    choice = operations.explained(operation, name)
    return {"kind": choice.kind, "sizes": list(choice.sizes), "implementation": min(right, key=lambda way: right[way])}


def _measured(operation: str, name: str, seconds: float, dry: bool) -> Iterator[dict[str, Any]]:
    if operation == "attention":
        return attention.measured(name, seconds, dry=dry)
    return operations.measured(operation, name, seconds, dry=dry)


def _shapes(names: Sequence[str], operation: str) -> Sequence[str]:
    shapes = _known(operation).shapes
    for name in names:
        if name not in shapes:
            raise UserError(f"no shape {name!r}{nearest(name, shapes)}; there are {', '.join(shapes)}")
    return list(names) or (attention.DEFAULT if operation == "attention" else list(shapes))


def _known(operation: str) -> operations.Operation:
    if operation not in OPERATIONS:
        raise UserError(
            f"no operation {operation!r}{nearest(operation, OPERATIONS)}; there are {', '.join(OPERATIONS)}"
        )
    return OPERATIONS[operation]
