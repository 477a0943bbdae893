"""A model of 8 B parameters: the memory of a training step with one technique after the other.

Each row is the training step, compiled for the target without a limit on memory, so that XLA recomputes nothing by
itself. In the first table the settings of a row also hold for the following rows, unless one of them replaces them. The
second table has alternatives to a row of the first. In the third, several GPUs train with AdamW in bfloat16. A row
takes a few seconds on a CPU and needs no GPU."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from jaxmem.lab.tour import Findings, common
from jaxmem.lab.tour.table import Bars, Row, Table, gib

SEVERAL = 8  # number of GPUs in the rows with ZeRO
BASE = common.CONFIGS["memory"]["base"]
PREDICTED, COMPILED, GIB = "predicted, bytes per parameter", "compiled, bytes per parameter", "per GPU, GiB"
LIMITS = {"10 GB GPU": 10.0, "24 GB GPU": 24.0, "80 GB GPU": 80.0}  # GiB


class Technique(NamedTuple):
    """A row of configs.yaml."""

    name: str
    formula: str
    overrides: str = ""
    gpus: int = 1
    is_alternative: bool = False


ROWS = tuple(Technique(**row) for row in common.CONFIGS["memory"]["rows"])


def measure(target: str, base: dict[str, Any] = BASE, rows: Sequence[Technique] = ROWS) -> Findings:
    """The tables for a kind of GPU."""
    kind = common.require_gpus("memory", target, SEVERAL)
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
        "Alternatives to rows of the first table": [row for row in rows if row.is_alternative],
        f"{model} per GPU, on {SEVERAL} x {kind}": [row for row in rows if row.gpus > 1],
    }
    first, last = (steps.rows[end][GIB] for end in (0, -1))
    return Findings(
        [steps, *(table(name, chosen) for name, chosen in others.items() if chosen)],
        "Weights + gradients + state: bytes per parameter. A step also has activations, logits and temporary buffers."
        " Predicted: computed from the config; compiled: allocated by XLA. Every row trains all weights: on"
        f" one GPU the step shrinks from {first:.1f} GiB to {last:.1f}. The figure shows the first table.",
        [Bars(steps, (GIB,), f"All weights trained, {steps.title}: GiB, planned", limits=LIMITS)],
    )


def _overrides(rows: Iterable[Technique]) -> Iterator[tuple[Technique, tuple[str, ...]]]:
    """Each row with all settings that apply to it."""
    settings: tuple[str, ...] = ()
    for row in rows:
        own = (*settings, *row.overrides.split())
        yield row, own
        settings = settings if row.is_alternative else own


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
