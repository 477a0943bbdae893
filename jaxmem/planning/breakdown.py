"""The memory of one device at its peak: every buffer of a compiled program, named and classified.

Arguments are known by their paths. A temporary is classified by the inputs that it was computed from, the pass that
computed it, and the purpose in its name (`kernels.scopes`). A value of the backward pass that has none of these,
but the shape of a gradient, is a gradient too. Nothing is estimated: the categories are sums of buffers, and bytes
outside of all buffers (gaps between buffers, tables of pointers) are `other`.
"""

import functools
import math
import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax

from jaxmem.kernels.scopes import purpose_of
from jaxmem.planning.buffers import Allocation, Lifetimes, Region, Snapshot, peak_of
from jaxmem.planning.hlo import Computation, HloShape, Instruction, Module, dot_flops
from jaxmem.sharding.table import Axes, is_axes, is_stacked
from jaxmem.step.categories import CATEGORIES, COPIES, GATHERED, ROLE_OF_CATEGORY, SAVED, category_of
from jaxmem.step.programs import Program

# Names of categories in tables and figures, if they differ from the names in JSON.
LABELS = {
    "parameters": "weights", "quantization": "block scales", "master": "master weights", "optimizer": "optimizer state"
}  # fmt: skip
# Kinds of activations.
LOGITS, ALL_SCORES = "logits", "attention: all scores"
UPDATES = "updates"  # the outputs of the optimizer; its inputs are summed or scaled gradients
STATE_COPIES = "working copies"  # copies of optimizer state
# The inputs of the program from which a value was computed.
Origins = int  # one bit per input
WEIGHTS, OPTIMIZER, BATCH, OTHER = 1, 2, 4, 8
GRADIENT = 16  # the value is the gradient of a weight, or computed from such gradients
NOWHERE = 0  # literals, and values that are computed from literals only
Dims = tuple[int, ...]
Result = tuple[Origins, ...]  # one for each array of an instruction's result


@dataclass(frozen=True)
class KnownShapes:
    """Shapes of a program's weights and gradients on one device, by which temporaries of the step are recognized."""

    stored: frozenset[Dims]  # weights as they are stored, layers stacked
    gradients: frozenset[Dims]  # all shapes of gradients: sharded or gathered, of one layer or stacked
    stacked_sizes: frozenset[int]  # numbers of elements of stacked gradients, for buffers that XLA reshaped
    # `stacked_dims` of all layers of a sharded weight, gathered; without those of sharded arrays.
    full_weights: frozenset[Dims]
    full_gradients: frozenset[Dims]
    layers: int | None = None  # number of layers of a stack on one device


@dataclass(frozen=True)
class NamedBuffer:
    category: str  # one of CATEGORIES
    kind: str  # the kind within a category: "logits", "saved for backward", ...
    size: int
    what: str  # the path of an argument, or the shape of a temporary
    made_by: str  # jax's name of the operation; "" if it has none
    shape: HloShape
    region: Region | None = None  # None: an argument or a result
    by_shape: bool = False  # whether it is classified by its shape


@dataclass(frozen=True)
class Breakdown:
    """The memory of a compiled program on one device."""

    module: Module
    allocations: Sequence[Allocation]
    known: KnownShapes

    @cached_property
    def buffers(self) -> list[NamedBuffer]:
        """Every named buffer at the peak, largest first."""
        buffers = list(self.permanent())
        for _, peak in self.peaks:
            buffers += [self.classify(region) for region in peak.regions]
            buffers.append(NamedBuffer("other", "gaps between buffers", peak.unused, "", "", HloShape("", 0)))
        return sorted((buffer for buffer in buffers if buffer.size), key=lambda buffer: -buffer.size)

    @cached_property
    def kinds(self) -> dict[str, dict[str, int]]:
        """Bytes of each category by kind, largest first; only categories that have bytes."""
        categories: dict[str, Counter[str]] = {category: Counter() for category in CATEGORIES}
        for buffer in self.buffers:
            categories[buffer.category][buffer.kind] += buffer.size
        return {category: dict(kinds.most_common()) for category, kinds in categories.items() if kinds}

    def of_kind(self, kind: str) -> int:
        return sum(kinds.get(kind, 0) for kinds in self.kinds.values())

    def on_host(self, *categories: str) -> int:
        """Bytes of arguments that are stored in host memory."""
        return sum(buffer.size for buffer in self.permanent(on_host=True) if buffer.category in categories)

    @cached_property
    def lifetimes(self) -> Lifetimes:
        return Lifetimes(self.module)

    @cached_property
    def peaks(self) -> list[tuple[Allocation, Snapshot]]:
        """The allocations of temporaries, each at its peak. XLA packs all temporaries into one."""
        temporaries = [
            allocation for allocation in self.allocations if allocation.kind == "temporary" and not allocation.on_host
        ]
        return [(allocation, peak_of(allocation, self.lifetimes)) for allocation in temporaries]

    def permanent(self, *, on_host: bool = False) -> Iterator[NamedBuffer]:
        """Arguments, results and captured arrays, which are in memory during the entire step."""
        inputs = {
            instruction.number: instruction
            for instruction in self.module.entry.instructions
            if instruction.opcode == "parameter"
        }
        for allocation in self.allocations:
            if allocation.on_host != on_host:
                continue
            if allocation.kind == "argument":
                assert allocation.parameter is not None
                path = inputs[allocation.parameter].op_name
                shape = inputs[allocation.parameter].shape
                yield NamedBuffer(category_of(path), "argument", allocation.size, path, "", shape)
            elif allocation.kind in ("output", "constant"):
                kind = "result" if allocation.kind == "output" else "constant"
                largest = max(allocation.buffers, key=lambda buffer: buffer.size)
                made_by = largest.aliases[0][0].op_name
                yield NamedBuffer("other", kind, allocation.size, str(largest.shape), made_by, largest.shape)

    @cached_property
    def _origins(self) -> dict[Instruction, Result]:
        return trace_origins(self.module, lambda instruction: input_origin(instruction.op_name))

    @cached_property
    def _backward(self) -> int:
        """The moment at which the backward pass begins: that of its first matrix multiplication."""
        matmuls = (
            time
            for time, instruction in enumerate(self.lifetimes.schedule)
            if pass_of(instruction.op_name) == "backward"
            and (dot_flops(instruction) or any(map(dot_flops, instruction.inner())))
        )
        return next(matmuls, self.lifetimes.end)

    def classify(self, region: Region) -> NamedBuffer:
        """A temporary, classified by the most informative of its buffers' aliases."""
        places = [place for buffer in region.buffers for place in buffer.aliases]
        maker = max((maker_of(instruction, index) for instruction, index in places), key=maker_rank)
        shape = max((buffer.shape for buffer in region.buffers), key=lambda shape: shape.bytes)
        origins = union(
            union(self._origins[instruction][instruction.shape.arrays_at(index)])
            for instruction, index in places
            if instruction in self._origins
        )
        category, kind, by_shape = self._category_and_kind(region, maker, shape, origins)
        return NamedBuffer(category, kind, region.size, str(shape), maker.op_name, shape, region, by_shape)

    def _category_and_kind(
        self, region: Region, maker: Instruction, shape: HloShape, origins: Origins
    ) -> tuple[str, str, bool]:
        """The category, the kind, and whether it is known only by the shape.

        Tests are in the order of their certainty, since each sees only what the tests before it left. First, from what
        a value is computed: weights alone, optimizer state alone. Then the scope of the update, before gradients,
        because its results are computed from them. Then the scopes of activations, before shapes, because logits may
        have the shape of a gradient. Last, when a value exists: a saved activation has no other mark.
        """
        dims = sorted_dims(shape.dims)
        when = pass_of(maker.op_name)
        purpose = purpose_of(maker.op_name)
        if origins == WEIGHTS:
            return "activations", COPIES if dims in self.known.stored else GATHERED, False
        if origins and not origins & ~(OPTIMIZER | OTHER):
            return "optimizer", STATE_COPIES, False
        if purpose == "update":
            return "gradients", UPDATES, False
        kind = "of one backward pass" if when == "backward" else UPDATES if origins & OPTIMIZER else "summed or scaled"
        if when != "forward" and origins & GRADIENT:
            return "gradients", kind, False
        spans = [self.lifetimes.of(buffer) for buffer in region.buffers]
        crosses = min(start for start, _ in spans) < self._backward <= max(end for _, end in spans)
        if purpose == "logits":
            return "activations", LOGITS, False
        if purpose == "all_scores":
            return "activations", ALL_SCORES, False
        has_shape = dims and (dims in self.known.gradients or shape.elements in self.known.stacked_sizes)
        may_be_gradient = purpose is None and when != "forward" and origins & BATCH
        if has_shape and may_be_gradient and not is_repeated(maker.op_name):
            return "gradients", kind, True
        if when == "update" and origins & OPTIMIZER:
            # With `memory.update: during` the boundaries of layers are written outside of `jvp`.
            is_saved = crosses and origins & BATCH
            return ("activations", SAVED, False) if is_saved else ("gradients", UPDATES, False)
        if when == "forward" and max(end for _, end in spans) >= self._backward:
            return "activations", SAVED, False
        return "activations", "attention" if purpose == "attention" else "intermediates", False


def input_origin(path: str) -> Origins:
    """The origin of an argument of a program, from its path in jax."""
    category = category_of(path)
    if category in ROLE_OF_CATEGORY:
        return WEIGHTS if ROLE_OF_CATEGORY[category] == "weights" else OPTIMIZER
    return BATCH if category == "batch" else OTHER


def pass_of(op_name: str) -> str:
    """The pass of a training step that an operation belongs to.

    >>> [pass_of(f"jit(step)/{name}") for name in ("jvp()/add", "transpose(jvp())/while/body/dot_general", "mul")]
    ['forward', 'backward', 'update']
    """
    if "transpose(" in op_name or is_recomputed(op_name):
        return "backward"
    return "forward" if "jvp(" in op_name else "update"


def is_repeated(op_name: str) -> bool:
    """Whether an operation copies, reads or recomputes a value instead of computing a new one."""
    return not op_name or op_name.endswith("dynamic_slice") or is_recomputed(op_name)


def is_recomputed(op_name: str) -> bool:
    """Whether an operation of the backward pass repeats one of the forward pass."""
    return "rematted_computation" in op_name


def maker_rank(maker: Instruction) -> tuple[bool, bool, bool]:
    """A rank of the operations that write one buffer: an operation that fills the buffer is more informative than an
    operation that initializes it with zeros."""
    return "dynamic_update_slice" in maker.op_name, bool(maker.frames), maker.op_name.startswith("jit(")


def maker_of(instruction: Instruction, index: tuple[int, ...]) -> Instruction:
    """The instruction whose source line describes a result: within a fusion, the instruction that computes this
    element; for a copy, the instruction that computed the copied value."""
    for _ in range(8):
        if instruction.is_fusion:
            root = instruction.called[0].root
            inner = root.operands[index[0]] if root.opcode == "tuple" and index else root
            while not inner.frames and inner.opcode != "parameter" and inner.operands:
                inner = inner.operands[0]
            if inner.frames:
                return inner
            if inner.opcode == "parameter" and not instruction.frames:
                instruction = instruction.operands[inner.number]
                index = ()
                continue
        if instruction.frames or not instruction.operands:
            return instruction
        instruction = instruction.operands[0]
        index = ()
    return instruction


def trace_origins(module: Module, of_input: Callable[[Instruction], Origins]) -> dict[Instruction, Result]:
    """The origins of the result of every instruction, propagated through every operation, in loops until they do not
    change: a cast, gathered or dequantized weight is computed from weights alone, whichever operations XLA inserted, a
    gradient from weights and batch. `of_input` returns the origin of an argument of the program."""
    origins: dict[Instruction, Result] = {}
    inputs = [instruction for instruction in module.entry.instructions if instruction.opcode == "parameter"]
    inputs.sort(key=lambda instruction: instruction.number)
    _run(module.entry, [_uniform(instruction, of_input(instruction)) for instruction in inputs], origins)
    return origins


def union(results: Iterable[Origins]) -> Origins:
    return functools.reduce(operator.or_, results, NOWHERE)


def _run(computation: Computation, arguments: Sequence[Result], origins: dict[Instruction, Result]) -> Result:
    for instruction in computation.instructions:
        origins[instruction] = (
            arguments[instruction.number] if instruction.opcode == "parameter" else _result(instruction, origins)
        )
    return origins[computation.root]


def _result(instruction: Instruction, origins: dict[Instruction, Result]) -> Result:
    operands = [origins[operand] for operand in instruction.operands]
    match instruction.opcode:
        case "get-tuple-element":
            return operands[0][instruction.operands[0].shape.arrays_at((instruction.number,))]
        case "async-done":
            return operands[0][instruction.operands[0].shape.arrays_at((1,))]  # the operand is (operands, results, ...)
        case "tuple":
            return sum(operands, ())
        case "copy" | "optimization-barrier":
            return operands[0]
        case "while":
            condition, body = sorted(instruction.called, key=lambda called: called.root.shape.dtype != "bool")
            state = operands[0]
            while (after := _either(state, _run(body, [state], origins))) != state:
                state = after
            _run(condition, [state], origins)
            return state
        case "conditional":
            branches = zip(instruction.called, operands[1:], strict=True)
            return _either(*(_run(branch, [argument], origins) for branch, argument in branches))
        case "fusion" | "call":
            return _run(instruction.called[0], operands, origins)
        case "async-start":
            started = sum(operands, ()) + _run(instruction.called[0], operands, origins)
            return started + (NOWHERE,) * (instruction.shape.arrays - len(started))
        case _:
            return _uniform(instruction, _computed(instruction, [union(operand) for operand in operands]))


def _computed(instruction: Instruction, operands: Sequence[Origins]) -> Origins:
    """The origins of a result, from those of the operands. The gradient of a weight is a matmul, in the backward pass,
    of two values that depend on the batch; the gradient of an activation is a matmul with a weight. The gradient of an
    embedding is what its lookup computes in the backward pass. New weights and optimizer state do not count as
    gradients, although they are computed from them."""
    result = union(operands)
    purpose = purpose_of(instruction.op_name)
    if purpose == "update" and result & GRADIENT:
        return result & ~(GRADIENT | BATCH) | OPTIMIZER
    is_transposed = pass_of(instruction.op_name) == "backward" and not is_recomputed(instruction.op_name)
    if purpose == "embedding" and is_transposed and result & BATCH:
        return result | GRADIENT
    if not dot_flops(instruction):
        return result
    is_of_weight = is_transposed and purpose not in ("attention", "all_scores")
    if is_of_weight and all(origins & BATCH or not origins for origins in operands):
        return result | GRADIENT
    return result & ~GRADIENT


def _uniform(instruction: Instruction, origins: Origins) -> Result:
    return (origins,) * instruction.shape.arrays


def _either(*results: Result) -> Result:
    """The origins of a result that equals one of several results."""
    return tuple(map(union, zip(*results, strict=True)))


def sorted_dims(dims: Iterable[int]) -> Dims:
    """The dimensions above 1, sorted: the same for an array and its transposes.

    >>> sorted_dims((1, 512, 32, 4096))
    (32, 512, 4096)
    """
    return tuple(sorted(d for d in dims if d != 1))


def stacked_dims(dims: Iterable[int]) -> Dims:
    """The dimensions of the weights of all layers, of which the first is the layers: the same for all transposes of a
    layer.

    >>> stacked_dims((32, 1, 4096, 512))
    (32, 512, 4096)
    """
    sizes = [d for d in dims if d != 1]
    return (*sizes[:1], *sorted(sizes[1:]))


def known_shapes(built: Program) -> KnownShapes:
    """The shapes of a program's weights and gradients, from its layout."""
    shapes_by_kind: dict[str, set[Any]] = defaultdict(set)
    params = built.spec.state.params

    def add(axes: Axes, leaf: Any, trainable: Any) -> None:
        stored, split, used, moments = (
            built.layout.sharding(role, axes, shape).shard_shape(shape)
            for role in ("weights", "gradients", "compute", "optimizer")
            for shape in (built.layout.padded(role, axes, leaf.shape),)
        )
        shapes_by_kind["stored"].update(sorted_dims(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(leaf))
        has_layers = is_stacked(axes)
        has_gradient = trainable is not None
        if has_gradient:
            for dims in (stored, split, used, moments, leaf.shape):
                count = dims[:1] if trainable.shape == leaf.shape else trainable.shape[:1]  # some layers may be frozen
                shapes = ((*count, *dims[1:]), dims[1:]) if has_layers else (dims,)
                shapes_by_kind["gradients"].update(map(sorted_dims, shapes))
        if not has_layers:
            return
        shapes_by_kind["layers"].add(stored[0])
        shapes_by_kind["sharded"].update(stacked_dims(dims) for dims in (stored, split) if dims != used)
        shapes_by_kind["full_weights"].update({stacked_dims(used)} if used != stored else ())
        if has_gradient:
            shapes_by_kind["stacked_sizes"].add(math.prod(split))
            shapes_by_kind["full_gradients"].update({stacked_dims(used)} if used != split else ())

    jax.tree.map(add, built.model.axes, params, built.model.select(params), is_leaf=is_axes)
    return KnownShapes(
        frozenset(shapes_by_kind["stored"]),
        frozenset(shapes_by_kind["gradients"]),
        frozenset(shapes_by_kind["stacked_sizes"]),
        frozenset(shapes_by_kind["full_weights"] - shapes_by_kind["sharded"]),
        frozenset(shapes_by_kind["full_gradients"] - shapes_by_kind["sharded"]),
        max(shapes_by_kind["layers"], default=None),
    )
