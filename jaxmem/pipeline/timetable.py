"""Pipeline schedules as tables, made and checked on the host: what each stage does in each tick, and where it stores
the results.

With p stages, m micro-batches and v rounds (groups of layers per stage), a stage has v m work items of each kind:

    F  the forward pass of a micro-batch through one group of layers
    B  its backward pass

A tick ends when all stages have finished it, since neighbours then send each other results. So the operations of a
tick should take the same time: a schedule alternates ticks of F and ticks of B. F of item k runs on stage s in the
(k + s)-th tick of F, for every schedule; they differ in when B starts:

    gpipe, circular            after the last F (Huang et al., arXiv:1811.06965); all items are in memory
    1f1b, interleaved_1f1b     as early as possible (Narayanan et al., arXiv:2104.04473): v p + p - 1 items in memory

Megatron's stages run at different paces and store p items with `1f1b`; here stage s stores 2 (p - s) - 1, because all
stages keep one pace. The bubble is the same.

Micro-batches go backward in their order, so gradients are summed in the same order as on one device.

`Timetable.slots` simulates a table and refuses it if an operation reads a result that has not arrived;
`check` also refuses a table without all operations.
"""

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

import numpy as np

from jaxmem.kernels.scopes import run_count

Name = Literal["gpipe", "circular", "1f1b", "interleaved_1f1b"]
IDLE, FORWARD, BACKWARD = range(3)
KINDS = ("idle", "forward", "backward")
COSTS = (0.0, 1.0, 2.0)  # the time of each operation in units of F


class WorkItem(NamedTuple):
    """An operation of a stage."""

    kind: int
    micro: int
    round_index: int


@dataclass(frozen=True)
class Timetable:
    """What each stage does: `kind`, `micro` and `round_index` are [ticks, stages]."""

    stages: int
    micro_batches: int
    rounds: int
    kind: np.ndarray
    micro: np.ndarray
    round_index: np.ndarray
    has_backward: bool = True

    @property
    def ticks(self) -> int:
        return len(self.kind)

    def rows(self) -> list[str]:
        """What each stage does, with a letter per tick.

        >>> timetable("1f1b", 2, 3).rows()
        ['FF.FB.BB', '.FBFBFB.']
        """
        return ["".join(".FB"[kind] for kind in stage) for stage in self.kind.T]

    def costs(self, recomputes: bool = False) -> np.ndarray:
        """The time of each operation. `recomputes`: whether a backward pass repeats the forward pass."""
        return np.asarray(COSTS) + recomputes * (np.arange(3) == BACKWARD)

    def scope(self, kind: int, recomputes: bool = False) -> str | None:
        """The name of a scope that tells the planner how often a stage runs an operation, and in how many ticks it is
        the longest operation, for which other stages wait; None: it never runs."""
        longest = np.argmax(self.costs(recomputes)[self.kind], axis=1)
        lasts = int(np.sum(self.kind[np.arange(self.ticks), longest] == kind))
        count = int(np.sum(self.kind == kind)) // self.stages
        return run_count(count, self.ticks, lasts) if count else None

    def micro_batch_of(self, stage: int, kind: int, round_index: int) -> np.ndarray:
        """For each tick, the micro-batch that a stage processes with this operation, or -1."""
        is_executed = (self.kind[:, stage] == kind) & (self.round_index[:, stage] == round_index)
        return np.where(is_executed, self.micro[:, stage], -1)

    def work(self) -> Iterator[tuple[int, int, WorkItem]]:
        """(tick, stage, operation), in the order of ticks."""
        for tick, stage in np.argwhere(self.kind != IDLE).tolist():
            places = (self.kind, self.micro, self.round_index)
            yield tick, stage, WorkItem(*(int(columns[tick, stage]) for columns in places))

    def idle_share(self, recomputes: bool = False) -> float:
        """The share of the time of a step in which a stage waits, where a tick takes as long as its longest operation.

        >>> [round(timetable(name, 4, 16).idle_share(), 3) for name in ("gpipe", "1f1b")]
        [0.158, 0.158]
        """
        costs = self.costs(recomputes)[self.kind]
        return float(1 - np.sum(costs) / (self.stages * np.sum(np.max(costs, axis=1))))

    @cached_property
    def slots(self) -> "Slots":
        return _slots(self)

    def next_stage(self, stage: int, round_index: int) -> tuple[int, int] | None:
        """The stage and round to which a forward pass sends its result; None for the last layers."""
        if stage < self.stages - 1:
            return stage + 1, round_index
        return (0, round_index + 1) if round_index < self.rounds - 1 else None

    def previous_stage(self, stage: int, round_index: int) -> tuple[int, int] | None:
        """The stage and round to which a backward pass sends its result; None for the first layers."""
        if stage:
            return stage - 1, round_index
        return (self.stages - 1, round_index - 1) if round_index else None


@dataclass(frozen=True)
class Slots:
    """Where results are stored until they are used, [ticks, stages]; -1: nowhere. Each is an index into a ring of
    arrays on a stage."""

    saved: np.ndarray  # what F saves for B of the same item
    inputs: np.ndarray  # the input of F; -1: the embedding of the micro-batch
    gradients: np.ndarray  # the gradient that B reads, or which F of the last layers writes
    received: np.ndarray  # where the activations are stored that arrive after the tick
    received_gradients: np.ndarray  # where the gradient is stored that arrives after the tick
    counts: tuple[int, int, int]  # the sizes of the rings of `saved`, `inputs` and `gradients`


_SAVED, _INPUTS, _GRADIENTS = range(3)  # the rings
_RINGS = ("saved activations", "inputs", "gradients")


def _slots(table: Timetable) -> Slots:
    """Runs the table, and assigns the lowest free slot to each result when it is written."""
    shape = (5, table.ticks, table.stages)
    saved, inputs, gradients, received, received_gradients = np.full(shape, -1, np.int32)
    rings = [[_Ring(contents) for _ in range(table.stages)] for contents in _RINGS]
    arriving: list[tuple[np.ndarray, int, int, int, tuple[int, int]]] = []
    now = -1

    def deliver() -> None:
        """Stores what arrives at the end of a tick, after the operations have freed their slots."""
        for where, ring, tick, stage, key in arriving:
            where[tick, stage] = rings[ring][stage].put(key)
        arriving.clear()

    for tick, stage, (kind, micro, round_index) in table.work():
        if tick != now:
            deliver()
            now = tick
        key = micro, round_index
        before = table.previous_stage(stage, round_index)
        after = table.next_stage(stage, round_index)
        if kind == FORWARD:
            if before is not None:
                inputs[tick, stage] = rings[_INPUTS][stage].take(key)
            if table.has_backward:
                saved[tick, stage] = rings[_SAVED][stage].put(key)
            if after is not None:
                arriving.append((received, _INPUTS, tick, after[0], (micro, after[1])))
            elif table.has_backward:
                gradients[tick, stage] = rings[_GRADIENTS][stage].put(key)
        else:
            gradients[tick, stage] = rings[_GRADIENTS][stage].take(key)
            saved[tick, stage] = rings[_SAVED][stage].take(key)
            if before is not None:
                arriving.append((received_gradients, _GRADIENTS, tick, before[0], (micro, before[1])))
    counts = tuple(max([1, *(ring.size for ring in rings_of_kind)]) for rings_of_kind in rings)
    return Slots(saved, inputs, gradients, received, received_gradients, counts)  # type: ignore[arg-type]


class _Ring:
    """The slots of one stage."""

    def __init__(self, contents: str) -> None:
        self._contents = contents
        self._held: dict[tuple[int, int], int] = {}
        self.size = 0

    def put(self, key: tuple[int, int]) -> int:
        used = set(self._held.values())
        slot = next(n for n in range(self.size + 1) if n not in used)
        self._held[key] = slot
        self.size = max(self.size, slot + 1)
        return slot

    def take(self, key: tuple[int, int]) -> int:
        if key not in self._held:
            raise ValueError(f"reads {self._contents} of micro-batch {key[0]}, round {key[1]} before they are there")
        return self._held.pop(key)


def check(table: Timetable) -> None:
    """Raises ValueError if an operation is missing or repeated, or reads a result that has not been sent by a neighbour
    in an earlier tick. A table that passes cannot deadlock: in each tick every stage executes its operation without
    waiting, and then all neighbours send each other their results."""
    kinds = [FORWARD, BACKWARD] if table.has_backward else [FORWARD]
    items = itertools.product(range(table.stages), kinds, range(table.micro_batches), range(table.rounds))
    expected = Counter(items)
    present = Counter((stage, *item) for _, stage, item in table.work())
    for wrong, what in ((present - expected, "repeated or unknown"), (expected - present, "missing")):
        for stage, kind, micro, round_index in sorted(wrong)[:1]:
            raise ValueError(f"stage {stage}: {KINDS[kind]} of micro-batch {micro}, round {round_index} is {what}")
    assert table.slots


@lru_cache(maxsize=64)
def timetable(name: Name, stages: int, micro_batches: int, rounds: int = 1) -> Timetable:
    """The table of a schedule.

    >>> timetable("gpipe", 2, 2).rows()
    ['FF..BB', '.FFBB.']
    """
    p = stages
    m = micro_batches
    v = rounds
    order = [_item(number, p, v) for number in range(v * m)]
    backward = [(micro, v - 1 - round_index) for micro, round_index in order]
    # The first tick of B on the last stage, counted in ticks of F: when the last layers have processed the first item.
    begin = v * m + p - 1 if name in ("gpipe", "circular") else order.index((0, v - 1)) + p - 1
    rows: list[list[WorkItem | None]] = []
    for pair in range(begin + v * m + p - 1):
        rows.append([_item_at(order, pair - s, FORWARD) for s in range(p)])
        rows.append([_item_at(backward, pair - begin - (p - 1 - s), BACKWARD) for s in range(p)])
    rows = [row for row in rows if any(row)]
    table = _table(p, m, v, rows)
    check(table)
    return table


@lru_cache(maxsize=64)
def evaluation(stages: int, micro_batches: int, rounds: int) -> Timetable:
    """The forward passes only."""
    order = [_item(number, stages, rounds) for number in range(rounds * micro_batches)]
    ticks = rounds * micro_batches + stages - 1
    rows = [[_item_at(order, tick - s, FORWARD) for s in range(stages)] for tick in range(ticks)]
    return _table(stages, micro_batches, rounds, rows, has_backward=False)


def _item(number: int, p: int, v: int) -> tuple[int, int]:
    """(micro-batch, round) of a work item. Groups of p micro-batches pass through all rounds, so that the result of the
    last stage reaches the first one just when it is needed."""
    if v == 1:
        return number, 0
    group, within = divmod(number, v * p)
    round_index, place = divmod(within, p)
    return group * p + place, round_index


def _item_at(items: list[tuple[int, int]], number: int, kind: int) -> WorkItem | None:
    return WorkItem(kind, *items[number]) if 0 <= number < len(items) else None


def _table(p: int, m: int, v: int, rows: list[list[WorkItem | None]], has_backward: bool = True) -> Timetable:
    values = np.asarray([[item or WorkItem(IDLE, 0, 0) for item in row] for row in rows], np.int32)
    return Timetable(p, m, v, values[..., 0], values[..., 1], values[..., 2], has_backward)
