"""A compiled module as XLA scheduled it: instructions with shapes, operands, order, and source lines.

The body of a loop is one computation that runs as often as the loop's trip count: `Module.executions`.

XLA's modules and buffer assignments are read with message classes that the protobuf library creates from `hlo.proto`.
jaxlib returns `HloProto` serialized and contains no message classes for it; the packages on PyPI that contain them
require TensorFlow.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from importlib.resources import files
from typing import Any, NamedTuple

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from jaxmem.kernels.scopes import mean_runs
from jaxmem.typing import JsonDict

_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "int32": _Field.TYPE_INT32, "int64": _Field.TYPE_INT64, "bool": _Field.TYPE_BOOL,
    "string": _Field.TYPE_STRING, "bytes": _Field.TYPE_BYTES,
}  # fmt: skip


def _message_classes() -> JsonDict:
    schema = files(__package__).joinpath("hlo.proto").read_text()
    file = descriptor_pb2.FileDescriptorProto(name="jaxmem_hlo.proto", package="jaxmem_hlo", syntax="proto3")
    for name, body in re.findall(r"message (\w+) \{(.*?)\}", schema, re.DOTALL):
        message = file.message_type.add(name=name)
        for repeated, kind, field_name, number in re.findall(r"(repeated )?(\w+) (\w+) = (\d+);", body):
            message.field.add(
                name=field_name,
                number=int(number),
                label=_Field.LABEL_REPEATED if repeated else _Field.LABEL_OPTIONAL,
                type=_SCALARS.get(kind, _Field.TYPE_MESSAGE),
                type_name=None if kind in _SCALARS else f".jaxmem_hlo.{kind}",
            )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    classes = message_factory.GetMessageClassesForFiles([file.name], pool)
    return {name.rpartition(".")[2]: message_class for name, message_class in classes.items()}


_CLASSES = _message_classes()
HloProto = _CLASSES["HloProto"]
HloModuleProto = _CLASSES["HloModuleProto"]
HloInstructionProto = _CLASSES["HloInstructionProto"]
ShapeProto = _CLASSES["ShapeProto"]
BufferAssignmentProto = _CLASSES["BufferAssignmentProto"]

# XLA's PrimitiveType: name and bits. Tuples, tokens and opaque types need no memory themselves.
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

CUDNN_CONVOLUTION = "__cudnn$conv"  # followed by the name of the pass
BLOCK_SCALED_DOT = "__cudnn$blockScaledDot"  # cuDNN's matmul of operands with block scales
HOST_SPACE = 5  # XLA's memory space of pinned host memory


class Frame(NamedTuple):
    """A line of source code."""

    file: str
    function: str  # qualified name
    line: int


@dataclass(frozen=True)
class HloShape:
    dtype: str
    bits: int
    dims: tuple[int, ...] = ()
    parts: tuple[HloShape, ...] = ()  # the elements of a tuple
    on_host: bool = False  # whether it is in pinned host memory

    @property
    def elements(self) -> int:
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        if self.parts:
            return sum(part.bytes for part in self.parts)
        return -(-self.elements * self.bits // 8)

    @cached_property
    def arrays(self) -> int:
        """The number of arrays in a tuple, nested tuples included; 1 for an array."""
        return sum(part.arrays for part in self.parts) if self.dtype == "tuple" else 1

    def at(self, index: tuple[int, ...]) -> HloShape:
        return self.parts[index[0]].at(index[1:]) if index else self

    def arrays_at(self, index: tuple[int, ...]) -> slice:
        """The positions, among all arrays of a tuple in order, of the arrays at an index."""
        shape = self
        first = 0
        for number in index:
            first += sum(part.arrays for part in shape.parts[:number])
            shape = shape.parts[number]
        return slice(first, first + shape.arrays)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclass(eq=False)
class Instruction:
    id: int
    name: str
    opcode: str
    shape: HloShape
    number: int  # the number of a parameter, or of the element that a get-tuple-element reads
    op_name: str  # jax's path of names: jit(step)/transpose(jvp())/while/body/...
    proto: Any = field(default_factory=HloInstructionProto, repr=False)
    frames: tuple[Frame, ...] = field(default=(), repr=False)  # innermost first
    operands: list[Instruction] = field(default_factory=list, repr=False)
    users: list[Instruction] = field(default_factory=list, repr=False)
    called: list[Computation] = field(default_factory=list, repr=False)
    computation: Computation = field(init=False, repr=False)  # the computation that contains it

    @cached_property
    def config(self) -> JsonDict:
        """The backend's configuration."""
        serialized = self.proto.backend_config
        return json.loads(serialized) if serialized.startswith(b'{"') else {}  # for a custom call it may be MLIR

    @property
    def attributes(self) -> dict[str, str]:
        """The frontend attributes that the program set."""
        return {entry.key: entry.value for entry in self.proto.frontend_attributes.map}

    @property
    def is_fusion(self) -> bool:
        return self.opcode == "fusion"

    def inner(self) -> Iterator[Instruction]:
        """The instructions of the computations that it calls, nested calls included."""
        for called in self.called:
            for instruction in called.instructions:
                yield instruction
                yield from instruction.inner()


@dataclass(eq=False)
class Computation:
    id: int
    name: str
    instructions: list[Instruction] = field(repr=False)  # in the order of the schedule
    root: Instruction = field(repr=False)


@dataclass(eq=False)
class Module:
    computations: list[Computation]
    entry: Computation
    by_id: dict[int, Instruction] = field(repr=False)

    @cached_property
    def executions(self) -> dict[Computation, Fraction | int]:
        """The runs of each computation in one run of the module; in a scope of `run_count`, their mean number."""
        times: dict[Computation, Fraction | int] = defaultdict(int)
        times[self.entry] = 1
        for caller in reversed(self.computations):  # callers come after the computations that they call
            for instruction in caller.instructions:
                for called, count in zip(instruction.called, runs_of_called(instruction), strict=True):
                    times[called] += times[caller] * count
        return times

    def walk(self) -> Iterator[Instruction]:
        """Every instruction of every computation."""
        for computation in self.computations:
            yield from computation.instructions


def runs_of_called(instruction: Instruction, *, time: bool = False) -> list[Fraction | int]:
    """The number of runs of each called computation in one run of an instruction. With `time`, the time in which this
    device waits for others (a pipeline stage for its neighbours) counts as further runs.

    In a scope `run_count(1, 200)` a conditional's true branch runs 1 of 200 times and its false branch the other times;
    without a scope each branch counts once.
    """
    if instruction.opcode == "while":
        return [trip_count(instruction, time=time)] * len(instruction.called)
    share = mean_runs(instruction.op_name.removesuffix("/cond")) if instruction.opcode == "conditional" else 1
    if share == 1:
        return [1] * len(instruction.called)
    truth_first = instruction.operands[0].shape.dtype == "bool"  # otherwise the operand is the index of a branch
    return [share, 1 - share] if truth_first else [1 - share, share]


def trip_count(loop: Instruction, *, time: bool = False) -> Fraction | int:
    """Iterations of a while loop: XLA's count, or the mean in the name of its scope (`jaxmem.stack.scheduled`), or
    1."""
    if "known_trip_count" in loop.config:
        return int(loop.config["known_trip_count"]["n"])
    return mean_runs(loop.op_name.removesuffix("/while"), time=time)


def dot_flops(instruction: Instruction) -> int:
    """FLOPs of one matrix multiplication, convolution or kernel of jaxmem; 0 for other instructions."""
    # A custom call may return a workspace in addition to its result.
    result = instruction.shape.parts[0] if instruction.shape.parts else instruction.shape
    if instruction.opcode == "dot":
        contracted = list(instruction.proto.dot_dimension_numbers.lhs_contracting_dimensions)
    elif instruction.opcode == "convolution" or instruction.proto.custom_call_target.startswith(CUDNN_CONVOLUTION):
        first, second = (operand.shape for operand in instruction.operands[:2])
        output, kernel = {
            f"{CUDNN_CONVOLUTION}BackwardInput": (first, second),
            f"{CUDNN_CONVOLUTION}BackwardFilter": (second, result),
        }.get(instruction.proto.custom_call_target, (result, second))
        features = instruction.proto.convolution_dimension_numbers.kernel_output_feature_dimension
        return 2 * output.elements * kernel.elements // max(kernel.dims[features], 1)
    elif instruction.opcode == "custom-call" and "gemm_backend_config" in instruction.config:
        dims = instruction.config["gemm_backend_config"]["dot_dimension_numbers"]
        contracted = [int(dim) for dim in dims["lhs_contracting_dimensions"]]
    elif instruction.proto.custom_call_target == BLOCK_SCALED_DOT:  # [batch, rows, width] x [batch, columns, width]
        contracted = [2]
    elif is_kernel(instruction):
        return round(float(instruction.attributes["flops_per_output"]) * result.elements)
    else:
        return 0
    return 2 * result.elements * math.prod(instruction.operands[0].shape.dims[dim] for dim in contracted)


def is_kernel(instruction: Instruction) -> bool:
    """Whether an instruction is a kernel whose metadata states its FLOPs (`jaxmem.kernels`)."""
    has_flops = instruction.opcode == "custom-call" and "flops_per_output" in instruction.attributes
    return has_flops and instruction.proto.custom_call_target != "AllocateBuffer"


def total_flops(module: Module) -> int:
    """FLOPs of all matrix multiplications in one run."""
    return flops_of(module.walk(), module)


def flops_of(instructions: Iterable[Instruction], module: Module) -> int:
    """FLOPs of these matrix multiplications in one run of the module."""
    return round(sum(dot_flops(part) * module.executions[part.computation] for part in instructions))


def rematerialized(module: Module) -> list[Instruction]:
    """The instructions that XLA recomputes or moves by itself to stay within memory, which it names `NAME.remat`."""
    return [instruction for instruction in module.walk() if ".remat" in instruction.name]


def recomputed(module: Module) -> list[Instruction]:
    """The instructions that XLA computes again by itself: `NAME.remat` if `NAME` or another copy of it is in the module
    too. If `NAME.remat` is the only one, `NAME` was moved, which costs nothing."""
    computed = set[str]()
    repeated = []
    for instruction in module.walk():
        original = instruction.name.partition(".remat")[0]
        if original in computed:
            repeated.append(instruction)
        computed.add(original)
    return repeated


def read_module(serialized: bytes) -> Module:
    """The module of a serialized HloModuleProto."""
    proto = HloModuleProto.FromString(serialized)
    stack = _call_stacks(proto.stack_frame_index)
    order = {entry.key: entry.value.instruction_ids for entry in proto.schedule.sequences}
    by_id: dict[int, Instruction] = {}
    computations: dict[int, Computation] = {}
    for computation in proto.computations:  # callees before their callers
        by_number = {
            raw.id: Instruction(
                id=raw.id,
                name=raw.name,
                opcode=raw.opcode,
                shape=_shape(raw.shape),
                number=raw.parameter_number if raw.opcode == "parameter" else raw.tuple_index,
                op_name=raw.metadata.op_name,
                proto=raw,
                frames=stack(raw.metadata.stack_frame_id),
            )
            for raw in computation.instructions
        }
        for raw in computation.instructions:
            by_number[raw.id].operands = [by_number[i] for i in raw.operand_ids]
            by_number[raw.id].called = [computations[i] for i in raw.called_computation_ids]
            for operand in by_number[raw.id].operands:
                operand.users.append(by_number[raw.id])
        in_order = [by_number[i] for i in order.get(computation.id, by_number)]
        computations[computation.id] = Computation(
            computation.id, computation.name, in_order, by_number[computation.root_id]
        )
        by_id |= by_number
        for instruction in in_order:
            instruction.computation = computations[computation.id]
    return Module(list(computations.values()), computations[proto.entry_computation_id], by_id)


@functools.cache
def _shape(serialized: bytes) -> HloShape:
    proto = ShapeProto.FromString(serialized)
    name, bits = _TYPES[proto.element_type]
    on_host = proto.layout.memory_space == HOST_SPACE
    return HloShape(name, bits, tuple(proto.dimensions), tuple(map(_shape, proto.tuple_shapes)), on_host)


def _call_stacks(index: Any) -> Callable[[int], tuple[Frame, ...]]:
    """Call stacks by id, innermost frame first. Ids count from 1; 0: no stack."""

    @functools.cache
    def stack(number: int) -> tuple[Frame, ...]:
        if number == 0:
            return ()
        frame = index.stack_frames[number - 1]
        place = index.file_locations[frame.file_location_id - 1]
        file = index.file_names[place.file_name_id - 1]
        function = index.function_names[place.function_name_id - 1]
        return (Frame(file, function, place.line), *stack(frame.parent_frame_id))

    return stack
