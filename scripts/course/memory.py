"""The bytes of a step with one technique after the other, compiled for a kind of GPU."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from jaxmem.config import load_config
from jaxmem.planning.targets import parse_target, usable_memory
from jaxmem.typing import JsonDict
from scripts.course import Findings, common, main
from scripts.course.batch_size import CARDS
from scripts.course.panels import Bars
from scripts.course.table import Row, Table, gib

ZERO_GPUS = 8  # number of GPUs in the rows with ZeRO
BASE = common.CONFIGS["memory"]["base"]
PREDICTED = "predicted, bytes per parameter"
COMPILED = "compiled, bytes per parameter"
GIB = "per GPU, GiB"


class Technique(NamedTuple):
    """A row of configs.yaml."""

    name: str
    formula: str
    overrides: str = ""
    gpus: int = 1
    is_alternative: bool = False


ROWS = tuple(Technique(**row) for row in common.CONFIGS["memory"]["rows"])


def measure(target: str, base: JsonDict = BASE, rows: Sequence[Technique] = ROWS) -> Findings:
    kind = common.require_gpus("memory", target, ZERO_GPUS)
    overrides = dict(_overrides(rows))
    plans: dict[str, JsonDict] = {}
    for gpus, alike in itertools.groupby(rows, lambda row: row.gpus):
        plans |= common.plans(f"{kind}:{gpus}", base, {row.name: overrides[row] for row in alike})

    def table(title: str, chosen: Sequence[Technique]) -> Table:
        rows = [_row(row, plans[row.name], overrides[row]) for row in chosen]
        return Table(title, rows, ("parts", "parameters", "overrides"))

    model = common.title(base)
    steps = table(f"{model}, on one {kind}", [row for row in rows if row.gpus == 1 and not row.is_alternative])
    others = {
        "Alternatives to rows of the first table": [row for row in rows if row.is_alternative],
        f"{model} per GPU, on {ZERO_GPUS} x {kind}": [row for row in rows if row.gpus > 1],
    }
    first, last = (steps.rows[end][GIB] for end in (0, -1))
    memory = load_config(BASE).memory
    limits = {f"{name} GPU": gib(usable_memory(parse_target(card), memory)) for name, card in CARDS.items()}
    return Findings(
        [steps, *(table(name, chosen) for name, chosen in others.items() if chosen)],
        {"first": first, "last": last},
        [Bars(steps, (GIB,), f"All weights trained, {steps.title}: GiB, planned", limits=limits)],
    )


def _overrides(rows: Iterable[Technique]) -> Iterator[tuple[Technique, tuple[str, ...]]]:
    """Each row with all settings that apply to it."""
    settings: tuple[str, ...] = ()
    for row in rows:
        of_row = (*settings, *row.overrides.split())
        yield row, of_row
        settings = settings if row.is_alternative else of_row


def _row(technique: Technique, plan: JsonDict, overrides: Sequence[str]) -> Row:
    parameters = plan["model"]["parameters"]
    parts = plan["bytes_per_device"]
    predicted = plan["predicted"]["total"]
    return {
        "technique": technique.name,
        "weights + gradients + state": technique.formula,
        PREDICTED: predicted and predicted / parameters,
        COMPILED: parts["total"] / parameters,
        GIB: gib(parts["total"]),
        "parameters": parameters,
        "parts": parts,
        "overrides": list(overrides),
    }


if __name__ == "__main__":
    main(__file__)
