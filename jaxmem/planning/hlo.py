"""A compiled module as XLA scheduled it: instructions with shapes, operands, order, and the source that made them.

Read from the serialized module (openxla/xla, `xla/service/hlo.proto`), so the numbers below are its field numbers.
A loop's body stands here once and runs as often as its trip count says: `Module.executions`.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Any, NamedTuple

from jaxmem.planning import wire
from jaxmem.planning.wire import Message

# PrimitiveType: name and bits. Tuples, tokens and opaque types hold nothing themselves.
_TYPES: dict[int, tuple[str, int]] = {
    1: ("bool", 8), 2: ("int8", 8), 3: ("int16", 16), 4: ("int32", 32), 5: ("int64", 64),
    6: ("uint8", 8), 7: ("uint16", 16), 8: ("uint32", 32), 9: ("uint64", 64),
    10: ("float16", 16), 11: ("float32", 32), 12: ("float64", 64), 16: ("bfloat16", 16),
    13: ("tuple", 0), 14: ("opaque", 0), 15: ("complex64", 64), 17: ("token", 0), 18: ("complex128", 128),
    19: ("float8_e5m2", 8), 20: ("float8_e4m3fn", 8), 21: ("int4", 4), 22: ("uint4", 4), 23: ("float8_e4m3b11fnuz", 8),
    24: ("float8_e5m2fnuz", 8), 25: ("float8_e4m3fnuz", 8), 26: ("int2", 2), 27: ("uint2", 2),
    28: ("float8_e4m3", 8), 29: ("float8_e3m4", 8), 30: ("int1", 1), 31: ("uint1", 1),
    32: ("float4_e2m1fn", 4), 33: ("float8_e8m0fnu", 8), 34: ("buffer", 0),
}  # fmt: skip

HOST_SPACE = 5  # XLA's number of pinned host memory


class Frame(NamedTuple):
    """A place in the source."""

    file: str
    function: str  # its qualified name
    line: int


@dataclass(frozen=True)
class Shape:
    dtype: str
    bits: int
    dims: tuple[int, ...] = ()
    parts: tuple[Shape, ...] = ()  # of a tuple
    on_host: bool = False  # in the host's pinned memory

    @property
    def elements(self) -> int:
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        if self.parts:
            return sum(part.bytes for part in self.parts)
        return -(-self.elements * self.bits // 8)

    def at(self, index: tuple[int, ...]) -> Shape:
        return self.parts[index[0]].at(index[1:]) if index else self

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclass(eq=False)
class Instruction:
    id: int
    name: str
    opcode: str
    shape: Shape
    number: int  # of a parameter, or which element of a tuple
    op_name: str  # jax's path of names: jit(step)/transpose(jvp())/while/body/...
    raw: Message = field(repr=False)
    frames: tuple[Frame, ...] = field(default=(), repr=False)  # innermost first
    operands: list[Instruction] = field(default_factory=list, repr=False)
    users: list[Instruction] = field(default_factory=list, repr=False)
    called: list[Computation] = field(default_factory=list, repr=False)
    home: Computation = field(init=False, repr=False)

    @cached_property
    def config(self) -> dict[str, Any]:
        """What the backend wants to know of it."""
        given = wire.text(self.raw, 43)
        return json.loads(given) if given.startswith('{"') else {}  # of custom calls it may be MLIR: {debug = false

    @cached_property
    def attributes(self) -> dict[str, str]:
        """What the program said of it to whoever reads the module."""
        entries = (entry for map_ in wire.messages(self.raw, 68) for entry in wire.messages(map_, 1))
        return {wire.text(entry, 1): wire.text(entry, 2) for entry in entries}

    @property
    def target(self) -> str:
        """Of a custom call."""
        return wire.text(self.raw, 28)

    @property
    def is_fusion(self) -> bool:
        return self.opcode == "fusion"


@dataclass(eq=False)
class Computation:
    id: int
    name: str
    instructions: list[Instruction] = field(repr=False)  # in the order in which they run
    root: Instruction = field(repr=False)


@dataclass(eq=False)
class Module:
    computations: list[Computation]
    entry: Computation
    by_id: dict[int, Instruction] = field(repr=False)

    @cached_property
    def executions(self) -> dict[Computation, Fraction | int]:
        """How often each computation runs in one run of the module, in the mean of many where a name says so."""
        times: dict[Computation, Fraction | int] = defaultdict(int)
        times[self.entry] = 1
        for caller in reversed(self.computations):  # callers come after what they call
            for one in caller.instructions:
                for called, often in zip(one.called, runs(one), strict=True):
                    times[called] += times[caller] * often
        return times

    def walk(self) -> Iterator[Instruction]:
        for computation in self.computations:
            yield from computation.instructions


def runs(one: Instruction) -> list[Fraction | int]:
    """How often one run of an instruction runs each of its computations.

    Of a conditional whose name says how often its condition holds (`runs_1_in_200`) one branch runs so often, the other
    the rest of the times. Of any other, each branch counts once.
    """
    if one.opcode == "while":
        return [trip_count(one)] * len(one.called)
    share = mean_runs(one.op_name.removesuffix("/cond")) if one.opcode == "conditional" else 1
    if share == 1:
        return [1] * len(one.called)
    truth_first = one.operands[0].shape.dtype == "bool"  # by an index: false is 0
    return [share, 1 - share] if truth_first else [1 - share, share]


def trip_count(loop: Instruction) -> Fraction | int:
    """How often a while loop's body runs, as XLA found it; where it did not, what the loop's name says of all its runs
    together (`jaxmem.stack.scheduled`), otherwise 1."""
    if "known_trip_count" in loop.config:
        return int(loop.config["known_trip_count"]["n"])
    return mean_runs(loop.op_name.removesuffix("/while"))


def mean_runs(name: str) -> Fraction | int:
    """
    >>> mean_runs("jit(step)/while/body/runs_9_in_16"), mean_runs("jit(step)")
    (Fraction(9, 16), 1)
    """
    said = re.search(r"\bruns_(\d+)_in_(\d+)$", name)
    return Fraction(int(said[1]), int(said[2])) if said else 1


def dot_flops(one: Instruction) -> int:
    """Multiplications and additions of one matrix product, convolution or kernel of ours; 0 of anything else."""
    if one.opcode == "dot":
        dims = wire.read(wire.data(one.raw, 30))
        contracted = wire.numbers(dims, 1)
        return 2 * one.shape.elements * math.prod(one.operands[0].shape.dims[d] for d in contracted)
    if one.opcode == "convolution":
        kernel = one.operands[1].shape
        outputs = wire.number(wire.read(wire.data(one.raw, 16)), 4)  # the kernel's dimension of output features
        return 2 * one.shape.elements * kernel.elements // max(kernel.dims[outputs], 1)
    if one.opcode == "custom-call" and "gemm_backend_config" in one.config:
        dims = one.config["gemm_backend_config"]["dot_dimension_numbers"]
        contracted = tuple(int(d) for d in dims["lhs_contracting_dimensions"])
        out = one.shape.parts[0] if one.shape.parts else one.shape
        return 2 * out.elements * math.prod(one.operands[0].shape.dims[d] for d in contracted)
    if one.opcode == "custom-call" and "flops_per_output" in one.attributes:  # a kernel of ours, which says it itself
        out = one.shape.parts[0] if one.shape.parts else one.shape
        return round(float(one.attributes["flops_per_output"]) * out.elements)
    return 0


def total_flops(module: Module) -> int:
    """Of all products in one run."""
    return round(sum(dot_flops(one) * module.executions[one.home] for one in module.walk()))


def read_module(serialized: bytes) -> Module:
    """From a serialized HloModuleProto."""
    proto = wire.read(serialized)
    frames = _Frames(wire.read(wire.data(proto, 17)))
    order = {
        wire.number(entry, 1): wire.numbers(wire.read(wire.data(entry, 2)), 1)
        for entry in wire.messages(wire.read(wire.data(proto, 7)), 1)
    }
    by_id: dict[int, Instruction] = {}
    computations: dict[int, Computation] = {}
    for one in wire.messages(proto, 3):
        computation = _computation(one, order, by_id, computations, frames)
        computations[computation.id] = computation
    for instruction in by_id.values():
        for operand in instruction.operands:
            operand.users.append(instruction)
    return Module(list(computations.values()), computations[wire.number(proto, 6)], by_id)


def _computation(
    proto: Message,
    order: dict[int, tuple[int, ...]],
    by_id: dict[int, Instruction],
    known: dict[int, Computation],
    frames: _Frames,
) -> Computation:
    own: dict[int, Instruction] = {}
    for raw in wire.messages(proto, 2):
        metadata = wire.read(wire.data(raw, 7))
        opcode = wire.text(raw, 2)
        one = Instruction(
            id=wire.number(raw, 35),
            name=wire.text(raw, 1),
            opcode=opcode,
            shape=_shape(wire.data(raw, 3)),
            number=wire.number(raw, 9 if opcode == "parameter" else 13),
            op_name=wire.text(metadata, 2),
            frames=frames[wire.number(metadata, 15)],
            raw=raw,
        )
        # Operands are listed before their users, callees before their callers.
        one.operands = [own[i] for i in wire.numbers(raw, 36)]
        one.called = [known[i] for i in wire.numbers(raw, 38)]
        own[one.id] = one
    by_id |= own
    identity = wire.number(proto, 5)
    in_order = [own[i] for i in order[identity]] if identity in order else list(own.values())
    computation = Computation(identity, wire.text(proto, 1), in_order, own[wire.number(proto, 6)])
    for one in in_order:
        one.home = computation
    return computation


_SHAPES: dict[bytes, Shape] = {}


def _shape(serialized: bytes) -> Shape:
    if serialized not in _SHAPES:
        proto = wire.read(serialized)
        name, bits = _TYPES[wire.number(proto, 2)]
        parts = tuple(_shape(part) for part in proto.get(4, ()) if isinstance(part, bytes))
        space = wire.number(wire.read(wire.data(proto, 5)), 8)  # of its layout
        _SHAPES[serialized] = Shape(name, bits, wire.numbers(proto, 3), parts, space == HOST_SPACE)
    return _SHAPES[serialized]


class _Frames:
    """Stack frames by number: where in the source an instruction was made. Numbers count from 1; 0 is none."""

    def __init__(self, index: Message) -> None:
        names = [[bytes(n).decode() for n in index.get(f, ()) if isinstance(n, bytes)] for f in (1, 2)]
        places = [
            Frame(names[0][wire.number(place, 1) - 1], names[1][wire.number(place, 2) - 1], wire.number(place, 3))
            for place in wire.messages(index, 3)
        ]
        self._frames = [(places[wire.number(f, 1) - 1], wire.number(f, 2)) for f in wire.messages(index, 4)]
        self._found: dict[int, tuple[Frame, ...]] = {0: ()}

    def __getitem__(self, number: int) -> tuple[Frame, ...]:
        if number not in self._found:
            place, parent = self._frames[number - 1]
            self._found[number] = (place, *self[parent])
        return self._found[number]
