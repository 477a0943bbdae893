"""A pipeline schedule as a table: what each stage does in each tick, and where it stores the results.

A tick ends when all stages have finished it, since neighbours then send each other results. `pipeline_schedules.py`
makes the tables, on the host. `Timetable.slots` runs one and refuses a table that reads a result before it is there;
`check` also refuses a table without all operations.
"""

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

IDLE, FORWARD, BACKWARD, WEIGHTS = range(4)
KINDS = ("idle", "forward", "backward", "weight gradient")
# The time of each operation, in forward passes: B has two matmuls for each one of F, or one with W on its own.
COSTS = {False: (0.0, 1.0, 2.0, 0.0), True: (0.0, 1.0, 1.0, 1.0)}


class WorkItem(NamedTuple):
    """An operation of a stage."""

    kind: int
    micro: int
    turn: int  # the round


@dataclass(frozen=True)
class Timetable:
    """What each stage does: `kind`, `micro` and `turn` are [ticks, stages]."""

    stages: int
    micro_batches: int
    rounds: int
    kind: np.ndarray
    micro: np.ndarray
    turn: np.ndarray
    trains: bool = True  # whether it has backward passes

    @property
    def ticks(self) -> int:
        return len(self.kind)

    def rows(self) -> list[str]:
        """What each stage does, with a letter per tick.

        >>> from jaxmem.stack.pipeline_schedules import timetable
        >>> timetable("1f1b", 2, 3).rows()
        ['FF.FB.BB', '.FBFBFB.']
        """
        return ["".join(".FBW"[kind] for kind in stage) for stage in self.kind.T]

    def costs(self, recomputes: bool = False) -> np.ndarray:
        """The time of each operation. `recomputes`: whether a backward pass repeats the forward pass."""
        return np.asarray(COSTS[self.splits_backward]) + recomputes * (np.arange(4) == BACKWARD)

    def scope(self, kind: int, recomputes: bool = False) -> str | None:
        """The name of a scope that tells the planner how often a stage runs an operation, and in how many ticks it is
        the longest operation, for which other stages wait; None: it never runs."""
        longest = np.argmax(self.costs(recomputes)[self.kind], axis=1)
        lasts = int(np.sum(self.kind[np.arange(self.ticks), longest] == kind))
        count = int(np.sum(self.kind == kind)) // self.stages
        return f"runs_{count}_in_{self.ticks}_lasts_{lasts}" if count else None

    @property
    def splits_backward(self) -> bool:
        """Whether weight gradients are operations of their own."""
        return bool(np.any(self.kind == WEIGHTS))

    def micro_batch_of(self, stage: int, kind: int, turn: int) -> np.ndarray:
        """In each tick, the micro-batch of which a stage executes this operation; -1: of none."""
        is_executed = (self.kind[:, stage] == kind) & (self.turn[:, stage] == turn)
        return np.where(is_executed, self.micro[:, stage], -1)

    def work(self) -> Iterator[tuple[int, int, WorkItem]]:
        """(tick, stage, operation), in the order of ticks."""
        for tick, stage in np.argwhere(self.kind != IDLE).tolist():
            places = (self.kind, self.micro, self.turn)
            yield tick, stage, WorkItem(*(int(each[tick, stage]) for each in places))

    def idle(self, recomputes: bool = False) -> float:
        """The share of the time of a step in which a stage waits, where a tick takes as long as its longest operation.

        >>> from jaxmem.stack.pipeline_schedules import timetable
        >>> [round(timetable(name, 4, 16).idle(), 3) for name in ("gpipe", "1f1b", "zero_bubble")]
        [0.158, 0.158, 0.059]
        """
        each = self.costs(recomputes)[self.kind]
        return float(1 - np.sum(each) / (self.stages * np.sum(np.max(each, axis=1))))

    @cached_property
    def slots(self) -> "Slots":
        return _slots(self)

    def next_stage(self, stage: int, turn: int) -> tuple[int, int] | None:
        """The stage and round to which a forward pass sends its result; None: it is the last."""
        if stage < self.stages - 1:
            return stage + 1, turn
        return (0, turn + 1) if turn < self.rounds - 1 else None

    def previous_stage(self, stage: int, turn: int) -> tuple[int, int] | None:
        """The stage and round to which a backward pass sends its result; None: it is the last one."""
        if stage:
            return stage - 1, turn
        return (self.stages - 1, turn - 1) if turn else None


@dataclass(frozen=True)
class Slots:
    """Where results are stored until they are used, [ticks, stages]; -1: nowhere. Each is an index into a ring of
    arrays on a stage."""

    saved: np.ndarray  # what F saves for B of the same item
    waiting: np.ndarray  # what B saves for W
    inputs: np.ndarray  # the input of F; -1: the embedding of the micro-batch
    gradients: np.ndarray  # the gradient that B reads, or which F of the last layers writes
    received: np.ndarray  # where the activations are stored that arrive after the tick
    returned: np.ndarray  # where the gradient is stored that arrives after the tick
    counts: tuple[int, int, int, int]  # the sizes of the rings of `saved`, `inputs`, `gradients` and `waiting`


_SAVED, _INPUTS, _GRADIENTS, _WAITING = range(4)  # the rings
_RINGS = ("saved activations", "inputs", "gradients", "values for the weight gradients")


def _slots(table: Timetable) -> Slots:  # noqa: C901
    """Runs the table, and assigns the lowest free slot to each result when it is written."""
    shape = (6, table.ticks, table.stages)
    saved, waiting, inputs, gradients, received, returned = np.full(shape, -1, np.int32)
    rings = [[_Ring(contents) for _ in range(table.stages)] for contents in _RINGS]
    arriving: list[tuple[np.ndarray, int, int, int, tuple[int, int]]] = []
    now = -1

    def deliver() -> None:
        """Stores what arrives at the end of a tick, after the operations have freed their slots."""
        for where, ring, tick, stage, key in arriving:
            where[tick, stage] = rings[ring][stage].put(key)
        arriving.clear()

    for tick, stage, (kind, micro, turn) in table.work():
        if tick != now:
            deliver()
            now = tick
        key, before, after = (micro, turn), table.previous_stage(stage, turn), table.next_stage(stage, turn)
        if kind == FORWARD:
            if before is not None:
                inputs[tick, stage] = rings[_INPUTS][stage].take(key)
            if table.trains:
                saved[tick, stage] = rings[_SAVED][stage].put(key)
            if after is not None:
                arriving.append((received, _INPUTS, tick, after[0], (micro, after[1])))
            elif table.trains:
                gradients[tick, stage] = rings[_GRADIENTS][stage].put(key)
        elif kind == BACKWARD:
            gradients[tick, stage] = rings[_GRADIENTS][stage].take(key)
            saved[tick, stage] = rings[_SAVED][stage].take(key)
            if table.splits_backward:
                waiting[tick, stage] = rings[_WAITING][stage].put(key)
            if before is not None:
                arriving.append((returned, _GRADIENTS, tick, before[0], (micro, before[1])))
        else:
            waiting[tick, stage] = rings[_WAITING][stage].take(key)
    counts = tuple(max([1, *(ring.size for ring in each)]) for each in rings)
    return Slots(saved, waiting, inputs, gradients, received, returned, counts)  # type: ignore[arg-type]


class _Ring:
    """The slots of one stage."""

    def __init__(self, contents: str) -> None:
        self._contents = contents
        self._held: dict[tuple[int, int], int] = {}
        self.size = 0

    def put(self, key: tuple[int, int]) -> int:
        slot = next(n for n in range(self.size + 1) if n not in self._held.values())
        self._held[key], self.size = slot, max(self.size, slot + 1)
        return slot

    def take(self, key: tuple[int, int]) -> int:
        if key not in self._held:
            raise ValueError(f"reads {self._contents} of micro-batch {key[0]}, round {key[1]} before they are there")
        return self._held.pop(key)


def check(table: Timetable) -> None:
    """Raises ValueError if an operation is missing or repeated, or reads a result that has not been sent by a neighbour
    in an earlier tick. A table that passes cannot deadlock: in each tick every stage executes its operation without
    waiting, and then all neighbours send each other their results."""
    kinds = [FORWARD, *([BACKWARD] * table.trains), *([WEIGHTS] * table.splits_backward)]
    items = itertools.product(range(table.stages), kinds, range(table.micro_batches), range(table.rounds))
    expected, found = Counter(items), Counter((stage, *one) for _, stage, one in table.work())
    for wrong, what in ((found - expected, "repeated or unknown"), (expected - found, "missing")):
        for stage, kind, micro, turn in sorted(wrong)[:1]:
            raise ValueError(f"stage {stage}: {KINDS[kind]} of micro-batch {micro}, round {turn} is {what}")
    assert table.slots
