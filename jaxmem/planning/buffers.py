"""The buffers that are alive in a compiled program's memory at each moment, and at its peak.

XLA packs all temporaries of one memory color into one allocation. The buffer assignment states each buffer's offset;
its lifetime follows from the schedule. Lifetimes are computed as in XLA: instructions are numbered in the order in
which they run, a loop's body before the loop; a buffer is alive from where it is computed to its last use under any of
its aliases. At the peak each byte of the allocation belongs to one buffer, or to a gap, which is the cost of packing.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from jaxmem.planning.hlo import HOST_SPACE, BufferAssignmentProto, Computation, HloShape, Instruction, Module

Kind = Literal["argument", "output", "temporary", "constant"]
Index = tuple[int, ...]  # a position in a nested tuple of arrays
Span = tuple[int, int]  # first and last moment


@dataclass(frozen=True)
class Buffer:
    """A value in memory."""

    offset: int
    size: int
    aliases: tuple[tuple[Instruction, Index], ...]  # instructions whose result has this value; the first computes it

    @property
    def shape(self) -> HloShape:
        made_by, index = self.aliases[0]
        return made_by.shape.at(index)


@dataclass(frozen=True)
class Allocation:
    kind: Kind
    size: int
    parameter: int | None  # number of the argument of the program; None: not an argument
    on_host: bool
    buffers: tuple[Buffer, ...]


@dataclass(frozen=True)
class Region:
    """Bytes of an allocation, and the buffers in them: a loop's carry is one region with many aliases."""

    size: int
    buffers: tuple[Buffer, ...]


@dataclass(frozen=True)
class Snapshot:
    """An allocation at one moment."""

    regions: tuple[Region, ...]
    unused: int  # bytes of the allocation that belong to no buffer
    time: int


def read_allocations(module: Module, serialized: bytes) -> list[Allocation]:
    """The allocations of a serialized BufferAssignmentProto."""
    proto = BufferAssignmentProto.FromString(serialized)
    logical = {value.id: value for value in proto.logical_buffers}
    aliases: dict[int, list[Any]] = defaultdict(list)
    for alias in proto.buffer_aliases:
        aliases[alias.source_buffer_id].append(alias.location)

    def place(location: Any) -> tuple[Instruction, Index]:
        return module.by_id[location.instruction_id], tuple(location.shape_index)

    def buffer(assigned: Any) -> Buffer:
        number = assigned.logical_buffer_id
        return Buffer(assigned.offset, assigned.size, tuple(map(place, [logical[number].defined_at, *aliases[number]])))

    def allocation(stored: Any) -> Allocation:
        kind: Kind = (
            "argument" if stored.is_entry_computation_parameter else
            "constant" if stored.is_constant else
            "output" if stored.maybe_live_out else
            "temporary"
        )  # fmt: skip
        number = stored.parameter_number if kind == "argument" else None
        return Allocation(kind, stored.size, number, stored.color == HOST_SPACE, tuple(map(buffer, stored.assigned)))

    return [allocation(stored) for stored in proto.buffer_allocations if not stored.is_thread_local]


def sizes_of(serialized: bytes, *, on_host: bool) -> dict[str, int]:
    """Bytes of a program in device memory or in host memory, from a serialized BufferAssignmentProto alone. Memory that
    an argument shares with an output counts as argument, as output and as aliased."""
    sizes = {"arguments": 0, "outputs": 0, "aliased": 0, "temporaries": 0, "constants": 0}
    for allocation in BufferAssignmentProto.FromString(serialized).buffer_allocations:
        if (allocation.color == HOST_SPACE) != on_host:
            continue
        is_argument = allocation.is_entry_computation_parameter
        is_output = allocation.maybe_live_out
        sizes["arguments"] += allocation.size * is_argument
        sizes["outputs"] += allocation.size * is_output
        sizes["aliased"] += allocation.size * (is_argument and is_output)
        sizes["constants"] += allocation.size * allocation.is_constant
        sizes["temporaries"] += allocation.size * (
            not (is_argument or is_output or allocation.is_thread_local or allocation.is_constant)
        )
    return sizes


class Lifetimes:
    """The moment at which each instruction of a module runs, and the lifetimes of values."""

    def __init__(self, module: Module) -> None:
        self._time: dict[Instruction, int] = {}
        self._span: dict[Computation, tuple[int, int]] = {}
        calls = (call for call in module.walk() if call.opcode in ("async-start", "call"))
        self._callers = {called: call for call in calls for called in call.called}
        self.end = self._number(module.entry, 0)

    def _number(self, computation: Computation, time: int) -> int:
        start = time
        for instruction in computation.instructions:
            if not instruction.is_fusion:
                for called in instruction.called:
                    if called not in self._span:
                        time = self._number(called, time)
            self._time[instruction] = time
            time += 1
        self._span[computation] = (start, time)
        return time

    @cached_property
    def schedule(self) -> list[Instruction]:
        """The instruction that runs at each moment."""
        return sorted(self._time, key=self._time.__getitem__)

    def of(self, buffer: Buffer) -> Span:
        """The lifetime of a value."""
        first = last = min(
            self._span[value.computation][0] if value.opcode == "parameter" else self._time[value]
            for value, _ in buffer.aliases
        )
        waiting = list(buffer.aliases)
        seen = set(buffer.aliases)
        while waiting:
            value, index = waiting.pop()
            following = []
            if value is value.computation.root:
                last = max(last, self._span[value.computation][1] - 1)
                if caller := self._callers.get(value.computation):
                    following.append((caller, (1, *index) if caller.opcode == "async-start" else index))
            for user in value.users:
                if user.opcode == "get-tuple-element" and index[:1] != (user.number,):
                    continue
                last = max(last, self._time[user])
                if user.opcode.endswith("-start"):  # an asynchronous operation reads until it is done
                    last = max(last, *(self._time[done] for done in user.users))
                following += _forwarded(value, index, user)
            waiting += (place for place in following if place not in seen)
            seen.update(following)
        return first, last


def _forwarded(value: Instruction, index: Index, user: Instruction) -> Iterator[tuple[Instruction, Index]]:
    """Where the value at `index` in the result of `value` is in the result of `user`; nowhere if `user` copies it."""
    if user.opcode in ("bitcast", "optimization-barrier", "all-reduce-done"):
        yield user, index
    elif user.opcode == "get-tuple-element" or user.opcode.endswith("-done"):
        picked = user.number if user.opcode == "get-tuple-element" else 1  # a start returns (operands, results, ...)
        if index[:1] == (picked,):
            yield user, index[1:]
    elif user.opcode == "tuple":
        for place, operand in enumerate(user.operands):
            if operand is value:
                yield user, (place, *index)


class Temporaries:
    """The allocation of a program's temporaries over the schedule."""

    def __init__(self, allocation: Allocation, lifetimes: Lifetimes) -> None:
        self.size = allocation.size
        self._spans = [(lifetimes.of(buffer), buffer) for buffer in allocation.buffers if buffer.size]

    @cached_property
    def peak(self) -> Snapshot:
        """The moment at which most of the allocation is in use."""
        moment, _ = max(self.in_use(), key=lambda change: change[1])
        return self.at(moment)

    def at(self, time: int) -> Snapshot:
        """The allocation at one moment."""
        places: dict[tuple[int, int], list[Buffer]] = defaultdict(list)
        for (first, last), buffer in self._spans:
            if first <= time <= last:
                places[buffer.offset, buffer.size].append(buffer)
        regions = []
        covered = 0
        # If regions overlap without being equal, the common bytes belong to the region that begins first.
        for (offset, size), buffers in sorted(places.items(), key=lambda place: (place[0][0], -place[0][1])):
            uncovered = max(0, offset + size - max(offset, covered))
            covered = max(covered, offset + size)
            if uncovered:
                regions.append(Region(uncovered, tuple(buffers)))
        return Snapshot(tuple(regions), self.size - sum(region.size for region in regions), time)

    def in_use(self) -> Iterator[tuple[int, int]]:
        """(moment, bytes in use from this moment on), for moment 0 and each moment at which they change; aliased places
        count once."""
        events: dict[int, list[tuple[int, tuple[int, int]]]] = defaultdict(list, {0: []})
        for (first, last), buffer in self._spans:
            events[first].append((1, (buffer.offset, buffer.size)))
            events[last + 1].append((-1, (buffer.offset, buffer.size)))
        users: Counter[tuple[int, int]] = Counter()
        used = 0
        for moment in sorted(events):
            for change, place in events[moment]:
                before = users[place] > 0
                users[place] += change
                used += ((users[place] > 0) - before) * place[1]
            yield moment, used
