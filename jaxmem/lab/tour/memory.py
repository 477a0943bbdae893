"""The headline table: a model of 8 B parameters, and what each technique leaves of its memory.

Each row is the training step compiled for the target with no limit on memory, so that only what the row says is
recomputed. In the first table a row's settings hold for the rows after it until one of them replaces them. The second
table has alternatives to a step of the first. In the third, several GPUs train with AdamW in bfloat16. A row needs a
few seconds of a CPU and no GPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from jaxmem.errors import UserError
from jaxmem.lab.tour import common
from jaxmem.lab.tour.panels import Bars
from jaxmem.lab.tour.stop import Findings
from jaxmem.lab.tour.table import Row, Table, gib
from jaxmem.planning.targets import parse_target

SEVERAL = 8  # GPUs, unless the target says how many
BASE = common.llm_config("llama3-8b", 4096, mesh={"fsdp": -1}, memory={"attention": "reference"})
PREDICTED, COMPILED, GIB = "predicted, bytes per parameter", "compiled, bytes per parameter", "per GPU, GiB"
LIMITS = {"10 GB GPU": 10.0, "24 GB GPU": 24.0, "80 GB GPU": 80.0}  # in GiB, as their memories are named


class Technique(NamedTuple):
    """A row. Where there are several GPUs, each text may refer to their number: `{gpus}`."""

    name: str
    formula: str  # bytes per parameter: weights + gradients + optimizer state (with any float32 weights)
    overrides: tuple[str, ...] = ()  # in force for the rows after it too, unless it is an alternative
    gpus: int = 1
    is_alternative: bool = False  # to the row after it

    def on(self, gpus: int) -> Technique:
        """A row of several GPUs, for this many."""
        if self.gpus == 1:
            return self
        name, formula, *overrides = (text.format(gpus=gpus) for text in (self.name, self.formula, *self.overrides))
        return self._replace(name=name, formula=formula, overrides=tuple(overrides), gpus=gpus)


def _alternative(name: str, formula: str, *overrides: str) -> Technique:
    return Technique(name, formula, overrides, is_alternative=True)


BFLOAT16 = ("precision.master=none", "precision.rounding=stochastic")
ADAMW = (
    "precision.parameters=bfloat16", "precision.rounding=stochastic", "optimizer.name=adamw",
    "optimizer.project_embeddings=null", "optimizer.clip_by=global", "memory.update=after", "batch.global_size={gpus}",
    "zero=1",
)  # fmt: skip
REMAINDER = ("precision.rounding=auto", "precision.master=remainder8")
ROWS = (
    Technique("AdamW in float32", "4 + 4 + 8"),
    Technique("fused attention", "4 + 4 + 8", ("memory.attention=auto",)),
    Technique("recompute all but matmuls", "4 + 4 + 8", ("memory.remat=dots",)),
    Technique("full recompute", "4 + 4 + 8", ("memory.remat=full",)),
    _alternative(
        "bfloat16 + float32 master weights", "2 + 2 + 12", "precision.parameters=bfloat16", "precision.master=float32"
    ),
    Technique("bfloat16, stochastic rounding", "2 + 2 + 4", ("precision.parameters=bfloat16", *BFLOAT16)),
    _alternative("Lion: one moment", "2 + 2 + 2", "optimizer.name=lion"),
    _alternative("Adafactor: factored moments", "2 + 2 + 0", "optimizer.name=adafactor"),
    _alternative("4-bit AdamW + 8-bit remainder", "2 + 2 + 2", "optimizer.name=adamw4bit", *REMAINDER),
    Technique("8-bit AdamW + 8-bit remainder", "2 + 2 + 3", ("optimizer.name=adamw8bit", *REMAINDER)),
    Technique(
        "8-bit GaLore, rank 1024", "2 + 2 + 1", ("optimizer.name=galore_adamw8bit", "optimizer.rank=1024", *BFLOAT16)
    ),
    _alternative("Q-GaLore, int8 weights", "1 + 2 + 1", "optimizer.name=qgalore", *common.INT8),
    Technique(
        "APOLLO-Mini, int8 weights", "1 + 2 + 1", ("optimizer.name=apollo_mini", "optimizer.rank=null", *common.INT8)
    ),
    Technique("embedding and output matrices projected", "1 + 2 + 0", ("optimizer.project_embeddings=true",)),
    Technique("update during the backward pass", "1 + 0 + 0", ("memory.update=during", "optimizer.clip_by=weight")),
    Technique("{gpus} GPUs, AdamW in bfloat16, ZeRO-1", "2 + 2 + 4/{gpus}", ADAMW, SEVERAL),
    Technique("ZeRO-2: gradients sharded", "2 + 2/{gpus} + 4/{gpus}", ("zero=2",), SEVERAL),
    Technique("ZeRO-3: weights sharded", "(2 + 2 + 4)/{gpus}", ("zero=3",), SEVERAL),
)


def measure(target: str, base: dict[str, Any] = BASE, rows: Sequence[Technique] = ROWS) -> Findings:
    """The table for a kind of GPU; the rows of several GPUs have as many as the target."""
    kind, _, amount = target.partition(":")
    count = parse_target(target).count if amount else SEVERAL
    if count == 1:
        raise UserError(
            f"tour memory --target {target}: the ZeRO rows need several GPUs; leave the number out for {SEVERAL}"
        )
    rows = [row.on(count) for row in rows]
    overrides = dict(_overrides(rows))
    plans: dict[str, dict[str, Any]] = {}
    for gpus, alike in itertools.groupby(rows, lambda row: row.gpus):
        plans |= common.plans(f"{kind}:{gpus}", base, {row.name: overrides[row] for row in alike})

    def table(title: str, chosen: Sequence[Technique]) -> Table:
        found = [_row(row, plans[row.name], overrides[row]) for row in chosen]
        return Table(title, found, ("parts", "parameters", "overrides"))

    model = common.title(base)
    steps = table(f"{model}, on one {kind}", [row for row in rows if row.gpus == 1 and not row.is_alternative])
    others = {
        "Alternatives to a step": [row for row in rows if row.is_alternative],
        f"{model} per GPU, on {count} x {kind}": [row for row in rows if row.gpus > 1],
    }
    first, last = (steps.rows[end][GIB] for end in (0, -1))
    return Findings(
        [steps, *(table(name, chosen) for name, chosen in others.items() if chosen)],
        "The formula counts weights, gradients and optimizer state; a step also holds activations, logits and temporary"
        " buffers. Predicted: arithmetic on the config alone; compiled: what XLA allocates. Every weight is trained in"
        f" every row: one GPU goes from {first:.1f} GiB to {last:.1f}. The figure shows the first table.",
        [Bars(steps, (GIB,), f"All weights trained, {steps.title}: GiB, planned", limits=LIMITS)],
    )


def _overrides(rows: Iterable[Technique]) -> Iterator[tuple[Technique, tuple[str, ...]]]:
    """Each row with all settings that are in force for it."""
    held: tuple[str, ...] = ()
    for row in rows:
        yield row, (*held, *row.overrides)
        held = held if row.is_alternative else (*held, *row.overrides)


def _row(technique: Technique, plan: dict[str, Any], overrides: Sequence[str]) -> Row:
    parameters, parts, predicted = plan["model"]["parameters"], plan["bytes_per_device"], plan["predicted"]["total"]
    return {
        "technique": technique.name,
        "weights + gradients + state": technique.formula,
        PREDICTED: predicted and predicted / parameters,
        COMPILED: parts["total"] / parameters,
        GIB: gib(parts["total"]),
        "measured, GiB": gib(plan["measured"]),
        "parameters": parameters,
        "parts": parts,
        "overrides": list(overrides),
    }
