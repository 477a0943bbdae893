"""The headline table: a model of 8 B parameters, one technique a row, each on top of the one before.

Every row is the training step compiled for the target, with no limit on memory, so that nothing is recomputed but
what the row says. A row takes some seconds of a processor and no GPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from jaxmem.config import load_config
from jaxmem.errors import UserError
from jaxmem.lab.tour import compiled
from jaxmem.lab.tour.stops import Columns, Found, Shown, Stop

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MODEL = "llama3-8b"
TARGET = "h100-80gb"
SEVERAL = 8  # GPUs, unless the target says how many
BASE: dict[str, Any] = {
    "name": "tour",
    "model": {"preset": MODEL},
    "data": {"source": "tokens", "path": "unused", "sequence_length": 4096},
    "batch": {"global_size": 1},
    "mesh": {"fsdp": -1},
    "memory": {"attention": "reference"},
    "train": {"steps": 1000},
}


@dataclass(frozen=True)
class Row:
    """One technique. Its overrides stay in force for the rows after it. Where there are several GPUs, all texts may
    name how many: `{gpus}`."""

    name: str
    overrides: tuple[str, ...]
    formula: str  # bytes a parameter of weights, gradients, optimizer's state (and its float32 weights)
    gpus: int = 1

    def on(self, gpus: int) -> Row:
        """The row of several GPUs, for so many."""
        if self.gpus == 1:
            return self
        name, formula, *overrides = (text.format(gpus=gpus) for text in (self.name, self.formula, *self.overrides))
        return Row(name, tuple(overrides), formula, gpus)


ROWS = (
    Row("AdamW in float32, all kept", (), "4 + 4 + 8"),
    Row("attention in blocks", ("memory.attention=auto",), "4 + 4 + 8"),
    Row("products kept, the rest again", ("memory.remat=dots",), "4 + 4 + 8"),
    Row("each layer again", ("memory.remat=full",), "4 + 4 + 8"),
    Row("bfloat16 with a float32 copy", ("precision.parameters=bfloat16", "precision.master=float32"), "2 + 2 + 12"),
    Row("bfloat16 alone", ("precision.master=none", "precision.rounding=stochastic"), "2 + 2 + 4"),
    Row("one moment: Lion", ("optimizer.name=lion",), "2 + 2 + 2"),
    Row("factored moments: Adafactor", ("optimizer.name=adafactor",), "2 + 2 + 0"),
    Row(
        "8-bit AdamW, weights with 8 bits more",
        ("optimizer.name=adamw8bit", "precision.rounding=auto", "precision.master=remainder8"),
        "2 + 2 + 3",
    ),
    Row("4-bit AdamW", ("optimizer.name=adamw4bit",), "2 + 2 + 2"),
    Row(
        "8-bit GaLore, rank 1024, bfloat16 alone",
        (
            "optimizer.name=galore_adamw8bit",
            "optimizer.rank=1024",
            "precision.master=none",
            "precision.rounding=stochastic",
        ),
        "2 + 2 + 1",
    ),
    Row(
        "Q-GaLore: int8 weights",
        ("optimizer.name=qgalore", "precision.parameters=int8", "precision.rounding=auto"),
        "1 + 2 + 1",
    ),
    Row("APOLLO-Mini", ("optimizer.name=apollo_mini", "optimizer.rank=null"), "1 + 2 + 1"),
    Row("embedding and output projection under it too", ("optimizer.project_embeddings=true",), "1 + 2 + 0"),
    Row("each layer updated in the backward pass", ("memory.update=during", "optimizer.clip_by=weight"), "1 + 0 + 0"),
    Row(
        "{gpus} GPUs, AdamW, ZeRO-1",
        (
            "precision.parameters=bfloat16",
            "precision.rounding=stochastic",
            "optimizer.project_embeddings=null",
            "optimizer.name=adamw",
            "optimizer.clip_by=global",
            "memory.update=after",
            "batch.global_size={gpus}",
            "zero=1",
        ),
        "2 + 2 + 4/{gpus}",
        SEVERAL,
    ),
    Row("ZeRO-2: gradients split", ("zero=2",), "2 + 2/{gpus} + 4/{gpus}", SEVERAL),
    Row("ZeRO-3: weights split", ("zero=3",), "(2 + 2 + 4)/{gpus}", SEVERAL),
)


def by_technique(target: str | None = None, base: dict[str, Any] = BASE, rows: Sequence[Row] = ROWS) -> Found:
    """The table for a GPU, by default an H100; so many of them as the target says are those of the rows of several."""
    kind, _, amount = (target or TARGET).partition(":")
    count = _count(target) if target and amount else SEVERAL
    found = list(_found(kind, base, [row.on(count) for row in rows]))
    columns: Columns = {
        "technique": lambda row: row["name"],
        "arithmetic, B/param": lambda row: row["formula"],
        "predicted": lambda row: _each(row, "predicted"),
        "compiled": lambda row: _each(row, "compiled"),
        "GiB a GPU": lambda row: f"{row['compiled'] / 2**30:.1f}",
    }
    columns |= compiled.measured(found)
    name = base["model"].get("preset", base["name"])
    title = f"{name} on {kind}, {base['data']['sequence_length']} tokens a GPU: bytes a parameter on each GPU"
    return Found([Shown(title, found, columns)], _note(kind, found), partial(_draw, rows=found))


def _found(kind: str, base: dict[str, Any], rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    overrides = dict(zip(rows, itertools.accumulate(row.overrides for row in rows), strict=True))
    cfgs = {row: load_config(base, overrides[row]) for row in rows}
    plans: dict[str, dict[str, Any]] = {}
    for gpus, alike in itertools.groupby(rows, lambda row: row.gpus):
        plans |= compiled.plans(f"{kind}:{gpus}", {row.name: cfgs[row] for row in alike})
    for row in rows:
        plan = plans[row.name]
        yield {
            "name": row.name,
            "overrides": list(overrides[row]),
            "formula": row.formula,
            "gpus": row.gpus,
            "parameters": plan["model"]["parameters"],
            "predicted": plan["predicted"]["total"],
            "compiled": plan["bytes_per_device"]["total"],
            "parts": plan["bytes_per_device"],
            "measured": plan.get("measured"),
        }


def _count(target: str) -> int:
    from jaxmem.planning.targets import parse_target

    count = parse_target(target).count
    if count == 1:
        raise UserError(
            f"target {target!r}: rows of several GPUs need more than one; leave the number out for {SEVERAL}"
        )
    return count


def _note(kind: str, rows: Sequence[dict[str, Any]]) -> str:
    first, last = rows[0], [row for row in rows if row["gpus"] == 1][-1]
    return (
        "Each row has the settings of those above it and one more; the arithmetic is of weights, gradients and"
        " optimizer's state, and what a step has beyond it are activations, logits and what is there only in passing."
        " Predicted is arithmetic on the config alone, compiled what XLA allocates, nothing left out; where the machine"
        f" has a GPU of that kind, {kind}, rows that fit also run and say what it held. Every weight is trained in"
        f" every row: one GPU goes from {_each(first, 'compiled')} bytes a parameter to {_each(last, 'compiled')}."
    )


def _each(row: dict[str, Any], field: str) -> str:
    return f"{row[field] / row['parameters']:.2f}" if row[field] else ""


def _draw(drawn: Figure, rows: Sequence[dict[str, Any]]) -> None:
    """On a scale that shows the last row as well as the first."""
    drawn.set_size_inches(9, 6)
    axes = drawn.subplots()
    places = range(len(rows))
    for field, look in (("compiled", "o"), ("predicted", "|"), ("measured", "x")):
        found = [(row[field] / row["parameters"], place) for place, row in zip(places, rows, strict=True) if row[field]]
        if found:
            axes.plot(*zip(*found, strict=True), look, label=field, ms=14 if look == "|" else 8, mew=2)
    for place, row in zip(places, rows, strict=True):
        at = max(row[field] or 0 for field in ("compiled", "predicted")) / row["parameters"]
        axes.annotate(_each(row, "compiled"), (at, place), (8, -3), textcoords="offset points", fontsize=9)
    axes.set_yticks(places, [row["name"] for row in rows])
    axes.invert_yaxis()
    axes.set(xscale="log", xlabel="bytes a parameter on each GPU", xlim=(1, 64))
    axes.set_xticks((1, 2, 4, 8, 16, 32), ("1", "2", "4", "8", "16", "32"))
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()


STOP = Stop(
    "memory",
    "one technique after the other, and the bytes that each leaves",
    by_technique,
    uses="compiler",
    config=["memory.update=during", "optimizer.name=apollo_mini", "precision.parameters=int8"],
    read=["jaxmem/lab/tour/memory.py", "jaxmem/planning/predict.py"],
    takes="about a minute, seconds once it is compiled,",
)
