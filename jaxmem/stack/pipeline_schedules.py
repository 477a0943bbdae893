"""Pipeline schedules as tables (`timetable.py`), made and checked on the host.

With p stages, m micro-batches and v rounds (groups of layers per stage), a stage has v m work items of each kind:

    F  the forward pass of a micro-batch through one group of layers
    B  its backward pass; with `zero_bubble` only the gradients of activations
    W  with `zero_bubble`, the gradients of weights

The operations of a tick should take the same time, because a tick ends when all stages have finished it: a schedule
alternates ticks of F and ticks of B, and a W may fill an idle place of either kind. F of item k runs on stage s in the
(k + s)-th tick of F, for every schedule; they differ in when B starts:

    gpipe, circular            after the last F (Huang et al., arXiv:1811.06965); all items are in memory
    1f1b, interleaved_1f1b     as early as possible (Narayanan et al., arXiv:2104.04473): v p + p - 1 items in memory
    zero_bubble                like 1f1b; W fills the ticks in which a stage waits for the last gradients (Qi et al.,
                               arXiv:2401.10241)

Megatron's stages run at different paces and store p items with `1f1b`; here stage s stores 2 (p - s) - 1, because all
stages keep one pace. The bubble is the same.

Micro-batches go backward in their order, so gradients are summed in the same order as on one device.
"""

from functools import lru_cache
from typing import Literal

import numpy as np

from jaxmem.stack.timetable import BACKWARD, FORWARD, IDLE, WEIGHTS, Timetable, WorkItem, check

Name = Literal["gpipe", "circular", "1f1b", "interleaved_1f1b", "zero_bubble"]


@lru_cache(maxsize=64)
def timetable(name: Name, stages: int, micro_batches: int, rounds: int = 1) -> Timetable:
    """The table of a schedule.

    >>> timetable("zero_bubble", 2, 2).rows()
    ['FF..BWBW', '.FBFBWW.']
    """
    p, m, v = stages, micro_batches, rounds
    order = [_item(number, p, v) for number in range(v * m)]
    backward = [(micro, v - 1 - turn) for micro, turn in order]
    # The first tick of B on the last stage, counted in ticks of F: when the last layers have processed the first item.
    begin = v * m + p - 1 if name in ("gpipe", "circular") else order.index((0, v - 1)) + p - 1
    count = max(begin, 0) + v * m + p - 1
    rows: list[list[WorkItem | None]] = []
    for pair in range(max(count, v * m + p - 1)):
        rows.append([_at(order, pair - s, FORWARD) for s in range(p)])
        rows.append([_at(backward, pair - begin - (p - 1 - s), BACKWARD) for s in range(p)])
    rows = [row for row in rows if any(row)]
    if name == "zero_bubble":  # if more W may wait, fewer places are idle, up to a limit
        rows = min((_with_weight_gradients(rows, p, most) for most in range(2 * p)), key=len)
    table = _table(p, m, v, rows)
    check(table)
    return table


@lru_cache(maxsize=64)
def evaluation(stages: int, micro_batches: int, rounds: int) -> Timetable:
    """The forward passes only."""
    order = [_item(number, stages, rounds) for number in range(rounds * micro_batches)]
    ticks = rounds * micro_batches + stages - 1
    rows = [[_at(order, tick - s, FORWARD) for s in range(stages)] for tick in range(ticks)]
    return _table(stages, micro_batches, rounds, rows, trains=False)


def _item(number: int, p: int, v: int) -> tuple[int, int]:
    """(micro-batch, round) of a work item. Groups of p micro-batches pass through all rounds, so that the result of the
    last stage reaches the first one just when it is needed."""
    if v == 1:
        return number, 0
    group, within = divmod(number, v * p)
    turn, place = divmod(within, p)
    return group * p + place, turn


def _at(items: list[tuple[int, int]], number: int, kind: int) -> WorkItem | None:
    return WorkItem(kind, *items[number]) if 0 <= number < len(items) else None


def _with_weight_gradients(rows: list[list[WorkItem | None]], p: int, most: int) -> list[list[WorkItem | None]]:
    """Adds W for each B: in idle places, and in ticks of their own after a tick of B in which every stage has more than
    `most` of them waiting."""
    waiting: list[list[WorkItem]] = [[] for _ in range(p)]
    result = []

    def fill(row: list[WorkItem | None]) -> None:
        row = [waiting[s].pop(0) if one is None and waiting[s] else one for s, one in enumerate(row)]
        for s, one in enumerate(row):
            if one is not None and one.kind == BACKWARD:
                waiting[s].append(one._replace(kind=WEIGHTS))
        result.append(row)

    for row in rows:
        fill(row)
        if min(map(len, waiting)) > most:
            fill([None] * p)
    while any(waiting):
        fill([None] * p)
    return result


def _table(p: int, m: int, v: int, rows: list[list[WorkItem | None]], trains: bool = True) -> Timetable:
    values = np.asarray([[one or WorkItem(IDLE, 0, 0) for one in row] for row in rows], np.int32)
    return Timetable(p, m, v, values[..., 0], values[..., 1], values[..., 2], trains)
