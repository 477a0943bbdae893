"""Which buffers live in a compiled program's memory at the moment when it is fullest.

XLA packs all temporaries of a program into one allocation; the buffer assignment says who lies where in it, the
schedule who lives when. Lifetimes are found as XLA finds them: instructions numbered in the order in which they
run, a loop's body before the loop; a buffer lives from where it is made to its last use under any of its names.
At the fullest moment each byte of the allocation belongs to one buffer, or to none: what packing costs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from jaxmem.planning import wire
from jaxmem.planning.hlo import HOST_SPACE, Computation, Instruction, Module, Shape
from jaxmem.planning.wire import Message

Kind = Literal["argument", "output", "temporary", "constant"]
Index = tuple[int, ...]  # into a tuple's shape
Span = tuple[int, int]  # first and last moment


@dataclass(frozen=True)
class Buffer:
    """A value that needs memory."""

    made_by: Instruction
    index: Index
    offset: int
    size: int
    names: tuple[tuple[Instruction, Index], ...]  # every place in the program where this value stands

    @property
    def shape(self) -> Shape:
        return self.made_by.shape.at(self.index)


@dataclass(frozen=True)
class Allocation:
    kind: Kind
    size: int
    parameter: int | None  # of the entry computation
    on_host: bool
    buffers: tuple[Buffer, ...]


@dataclass(frozen=True)
class Held:
    """So many bytes of an allocation, and the buffers that share them: a loop's carry is one place with many names."""

    size: int
    buffers: tuple[Buffer, ...]


@dataclass(frozen=True)
class Moment:
    """One moment of an allocation."""

    held: tuple[Held, ...]
    unused: int  # bytes of the allocation that belong to nobody then
    time: int


def read_allocations(module: Module, serialized: bytes) -> list[Allocation]:
    """From a serialized BufferAssignmentProto."""
    proto = wire.read(serialized)
    logical = {wire.number(one, 1): one for one in wire.messages(proto, 1)}
    aliases: dict[int, list[Message]] = defaultdict(list)
    for alias in wire.messages(proto, 2):
        aliases[wire.number(alias, 1)].append(wire.read(wire.data(alias, 2)))

    def place(location: Message) -> tuple[Instruction, Index]:
        return module.by_id[wire.number(location, 4)], wire.numbers(location, 3)

    def buffer(assigned: Message) -> Buffer:
        identity = wire.number(assigned, 1)
        made_by, index = place(wire.read(wire.data(logical[identity], 3)))
        names = ((made_by, index), *(place(alias) for alias in aliases[identity]))
        return Buffer(made_by, index, wire.number(assigned, 2), wire.number(assigned, 3), names)

    found = []
    for one in wire.messages(proto, 3):
        if wire.number(one, 3):  # a thread's own scratch on a CPU's stack
            continue
        kind: Kind = (
            "argument" if wire.number(one, 5) else
            "constant" if wire.number(one, 12) else
            "output" if wire.number(one, 7) else
            "temporary"
        )  # fmt: skip
        found.append(
            Allocation(
                kind,
                wire.number(one, 2),
                wire.number(one, 6) if kind == "argument" else None,
                wire.number(one, 8) == HOST_SPACE,
                tuple(buffer(assigned) for assigned in wire.messages(one, 9)),
            )
        )
    return found


def sizes_of(serialized: bytes, *, on_host: bool) -> dict[str, int]:
    """Bytes of a program, on the device or of host memory, as XLA counts them: of a serialized BufferAssignmentProto,
    without its module. What an argument shares with an output is in both, and aliased."""
    sizes = {"arguments": 0, "outputs": 0, "aliased": 0, "temporaries": 0}
    for one in wire.messages(wire.read(serialized), 3):
        if (wire.number(one, 8) == HOST_SPACE) != on_host:
            continue
        is_argument, is_output = wire.number(one, 5), wire.number(one, 7)
        in_no_memory = wire.number(one, 3) or wire.number(one, 12)  # a thread's own scratch; constants
        counts = {
            "arguments": is_argument,
            "outputs": is_output,
            "aliased": is_argument and is_output,
            "temporaries": not (is_argument or is_output or in_no_memory),
        }
        for name, counted in counts.items():
            sizes[name] += wire.number(one, 2) if counted else 0
    return sizes


class Lifetimes:
    """When each instruction of a module runs, and from when to when a value is needed."""

    def __init__(self, module: Module) -> None:
        self._time: dict[Instruction, int] = {}
        self._span: dict[Computation, tuple[int, int]] = {}
        calls = (one for one in module.walk() if one.opcode in ("async-start", "call"))
        self._callers = {called: one for one in calls for called in one.called}
        self.end = self._number(module.entry, 0)

    def _number(self, computation: Computation, time: int) -> int:
        start = time
        for one in computation.instructions:
            if not one.is_fusion:
                for called in one.called:
                    if called not in self._span:
                        time = self._number(called, time)
            self._time[one] = time
            time += 1
        self._span[computation] = (start, time)
        return time

    @cached_property
    def moments(self) -> list[Instruction]:
        """The instruction that runs at each moment."""
        return sorted(self._time, key=self._time.__getitem__)

    def of(self, buffer: Buffer) -> Span:
        """When a value is needed."""
        first = last = min(
            self._span[one.home][0] if one.opcode == "parameter" else self._time[one] for one, _ in buffer.names
        )
        waiting, seen = list(buffer.names), set(buffer.names)
        while waiting:
            one, index = waiting.pop()
            following = []
            if one is one.home.root:
                last = max(last, self._span[one.home][1] - 1)
                if caller := self._callers.get(one.home):
                    following.append((caller, (1, *index) if caller.opcode == "async-start" else index))
            for user in one.users:
                if user.opcode == "get-tuple-element" and index[:1] != (user.number,):
                    continue
                last = max(last, self._time[user])
                if user.opcode.endswith("-start"):  # reads until it is done
                    last = max(last, *(self._time[done] for done in user.users))
                following += _forwarded(one, index, user)
            waiting += (name for name in following if name not in seen)
            seen.update(following)
        return first, last


def _forwarded(one: Instruction, index: Index, user: Instruction) -> Iterator[tuple[Instruction, Index]]:
    """Where a value that stands at `index` of an instruction's result stands in its user's, without a copy."""
    if user.opcode in ("bitcast", "optimization-barrier", "all-reduce-done"):
        yield user, index
    elif user.opcode == "get-tuple-element" or user.opcode.endswith("-done"):
        picked = user.number if user.opcode == "get-tuple-element" else 1  # a start gives (operands, results, ...)
        if index[:1] == (picked,):
            yield user, index[1:]
    elif user.opcode == "tuple":
        for place, operand in enumerate(user.operands):
            if operand is one:
                yield user, (place, *index)


def fullest(allocation: Allocation, lifetimes: Lifetimes) -> Moment:
    """The moment when most of an allocation is in use."""
    spans = [(lifetimes.of(buffer), buffer) for buffer in allocation.buffers if buffer.size]
    return held_at(allocation, spans, _busiest(spans))


def held_at(allocation: Allocation, spans: Iterable[tuple[Span, Buffer]], at: int) -> Moment:
    """Who holds which bytes of an allocation at one moment; `spans` are its buffers' lifetimes."""
    live = [buffer for (first, last), buffer in spans if first <= at <= last]
    places: dict[tuple[int, int], list[Buffer]] = defaultdict(list)
    for buffer in live:
        places[buffer.offset, buffer.size].append(buffer)
    held, covered = [], 0
    # Where places overlap without being the same, the one that begins first keeps the common bytes.
    for (offset, size), buffers in sorted(places.items(), key=lambda place: (place[0][0], -place[0][1])):
        own = max(0, offset + size - max(offset, covered))
        covered = max(covered, offset + size)
        if own:
            held.append(Held(own, tuple(buffers)))
    return Moment(tuple(held), allocation.size - sum(one.size for one in held), at)


def _busiest(spans: Iterable[tuple[Span, Buffer]]) -> int:
    """The moment with the most bytes in use, places with several names counted once."""
    events: dict[int, list[tuple[int, tuple[int, int]]]] = defaultdict(list)
    for (first, last), buffer in spans:
        events[first].append((1, (buffer.offset, buffer.size)))
        events[last + 1].append((-1, (buffer.offset, buffer.size)))
    users: Counter[tuple[int, int]] = Counter()
    used, best, at = 0, -1, 0
    for time in sorted(events):
        for change, place in events[time]:
            before = users[place] > 0
            users[place] += change
            used += ((users[place] > 0) - before) * place[1]
        if used > best:
            best, at = used, time
    return at
