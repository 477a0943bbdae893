"""The ticks of each pipeline schedule, its idle time, and the micro-batches that each stage holds."""

from collections.abc import Mapping

import numpy as np

from jaxmem.errors import UserError
from jaxmem.pipeline.timetable import BACKWARD, FORWARD, Name, Timetable, timetable
from jaxmem.report.page import OPERATIONS
from scripts.course import Findings, main
from scripts.course.panels import PALE, Bars, Cells
from scripts.course.table import Table

HELD = "saved activations, in micro-batches"
KEY = {**OPERATIONS, ".": ("idle", PALE)}
# Name, rounds: the groups of layers of a stage that a micro-batch passes through one after the other.
SCHEDULES: Mapping[str, tuple[Name, int]] = {
    "GPipe": ("gpipe", 1),
    "1F1B": ("1f1b", 1),
    "circular, 2 rounds": ("circular", 2),
    "interleaved 1F1B, 2 rounds": ("interleaved_1f1b", 2),
}


def measure(stages: int, micro_batches: int) -> Findings:
    for name, number in (("--stages", stages), ("--micro-batches", micro_batches)):
        if number < 1:
            raise UserError(f"pipeline does not support {name} {number}; use 1 or more")
    chosen = {
        title: (name, rounds)
        for title, (name, rounds) in SCHEDULES.items()
        if rounds == 1 or micro_batches % stages == 0  # groups of `stages` micro-batches pass through all rounds
    }
    tables = {title: timetable(name, stages, micro_batches, rounds) for title, (name, rounds) in chosen.items()}
    rows = [
        {
            "schedule": title,
            "ticks": table.ticks,
            "idle, %": 100 * table.idle_share(),
            "formula, %": 100 * (stages - 1) / (table.rounds * micro_batches + stages - 1),
            "most micro-batches held by a stage": max(count_saved(table)),
        }
        for title, table in tables.items()
    ]
    memory = [
        {"stage": f"stage {stage}", **{title: count_saved(table)[stage] for title, table in tables.items()}}
        for stage in range(stages)
    ]
    panels = [panel for title, table in tables.items() for panel in (_ticks(title, table), _memory(table))]
    return Findings(
        [
            Table(f"{stages} stages, {micro_batches} micro-batches", rows),
            Table("The most activations of a stage, in those of one micro-batch", memory),
        ],
        {"stages": stages, "micro": micro_batches, "gpipe": rows[0]["idle, %"], "one": 100 * (stages - 1) / stages},
        panels,
        (8, 3),
    )


def count_saved(table: Timetable) -> list[float]:
    """For each stage, the largest number of micro-batches whose activations it saves for their backward passes. A round
    has a share of the layers of a stage, and saves that share."""
    change = (table.kind == FORWARD).astype(int)
    change[1:] -= (table.kind == BACKWARD)[:-1]  # a backward pass reads the activations until its end
    groups = np.cumsum(change, axis=0).max(axis=0)
    return [n // table.rounds if n % table.rounds == 0 else n / table.rounds for n in groups.tolist()]


def _ticks(title: str, table: Timetable) -> Cells:
    idle = 100 * table.idle_share()
    return Cells(f"{title}: idle {idle:.0f} % of the time", dict(zip(_names(table), table.rows(), strict=True)), KEY)


def _memory(table: Timetable) -> Bars:
    rows = [{"stage": name, HELD: count} for name, count in zip(_names(table), count_saved(table), strict=True)]
    return Bars(Table("Memory: micro-batches held", rows), (HELD,), inches=1.0, end=1.25 * table.micro_batches)


def _names(table: Timetable) -> list[str]:
    return [str(stage) for stage in range(table.stages)]


if __name__ == "__main__":
    main(__file__)
