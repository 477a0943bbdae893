"""The memory of one device at its peak: every buffer of a compiled program, named and classified.

Arguments are known by their paths. A temporary is classified by the inputs that it was computed from (`origins`), the
pass that computed it, and the purpose in its name (`kernels.scopes`). A value from the batch, after the forward pass
and without a purpose, that has the shape of a gradient is one too. Nothing is estimated: the categories are sums of
buffers, and bytes outside of all buffers (gaps between buffers, tables of pointers) are `other`.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax

from jaxmem.kernels.scopes import purpose_of
from jaxmem.planning.buffers import Allocation, Buffer, Lifetimes, Region, Temporaries
from jaxmem.planning.hlo import HloShape, Instruction, Module, dot_flops
from jaxmem.planning.origins import (
    BATCH,
    GRADIENT,
    OPTIMIZER,
    OTHER,
    WEIGHTS,
    Origins,
    Result,
    input_origin,
    is_repeated,
    pass_of,
    trace_origins,
    union,
)
from jaxmem.sharding.layout import Layout
from jaxmem.sharding.table import Axes, Role, is_axes, is_stacked
from jaxmem.step.categories import CATEGORIES, COPIES, GATHERED, SAVED, category_of
from jaxmem.step.programs import Program

# Names of categories in tables and figures, if they differ from the names in JSON.
LABELS = {
    "parameters": "weights", "quantization": "block scales", "master": "master weights", "optimizer": "optimizer state"
}  # fmt: skip
# Kinds of activations.
LOGITS, ALL_SCORES = "logits", "attention: all scores"
UPDATES = "updates"  # the outputs of the optimizer; its inputs are summed or scaled gradients
STATE_COPIES = "working copies"  # copies of optimizer state
Dims = tuple[int, ...]


@dataclass
class KnownShapes:
    """Shapes of a program's weights and gradients on one device, by which temporaries of the step are recognized."""

    stored: set[Dims] = field(default_factory=set)  # weights as they are stored, layers stacked
    gradients: set[Dims] = field(default_factory=set)  # sharded or gathered, of one layer or stacked
    stacked_sizes: set[int] = field(default_factory=set)  # elements of stacked gradients, which XLA may reshape
    # `stacked_dims` of all layers of a sharded weight, gathered; without those of sharded arrays.
    full_weights: set[Dims] = field(default_factory=set)
    full_gradients: set[Dims] = field(default_factory=set)
    layers: int = 0  # number of layers of a stack on one device; 0: no stack


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
    known: KnownShapes = field(default_factory=KnownShapes)

    @cached_property
    def buffers(self) -> list[NamedBuffer]:
        """Every named buffer at the peak, largest first."""
        peak = self.temporaries.peak
        gaps = NamedBuffer("other", "gaps between buffers", peak.unused, "", "", HloShape("", 0))
        buffers = [*self.permanent(), *map(self.classify, peak.regions), gaps]
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
    def temporaries(self) -> Temporaries:
        """The temporaries in device memory. XLA packs those of one memory color into one allocation; here the
        allocations follow one another."""
        size = 0
        buffers: list[Buffer] = []
        for allocation in self.allocations:
            if allocation.kind == "temporary" and not allocation.on_host:
                buffers += [replace(buffer, offset=size + buffer.offset) for buffer in allocation.buffers]
                size += allocation.size
        return Temporaries(Allocation("temporary", size, None, False, tuple(buffers)), self.lifetimes)

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
        """The category, the kind, and whether it is known only by the shape. The first test that holds decides:

        1. from weights alone: activations, a gathered or cast weight; a copy if it has the shape of a stored weight
        2. from optimizer state alone, or only the other inputs (step): optimizer, working copies
        3. purpose update: gradients, updates; before 4, because updates are computed from gradients
        4. from a gradient, not in the forward pass: gradients
        5. purpose logits or all_scores: activations; before 6, because logits may have the shape of a gradient
        6. the shape of a gradient, from the batch, not in the forward pass, no purpose, not repeated: gradients
        7. from optimizer state, in the update pass: gradients, updates; activations, saved for backward, if it is
           computed from the batch too, and in memory before and after the backward pass begins
        8. in the forward pass, and in memory after the backward pass begins: activations, saved for backward
        9. all others: activations, of attention if that is the purpose
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
        if purpose in ("logits", "all_scores"):
            return "activations", LOGITS if purpose == "logits" else ALL_SCORES, False
        has_shape = dims and (dims in self.known.gradients or shape.elements in self.known.stacked_sizes)
        may_be_gradient = purpose is None and when != "forward" and origins & BATCH
        if has_shape and may_be_gradient and not is_repeated(maker.op_name):
            return "gradients", kind, True
        spans = [self.lifetimes.of(buffer) for buffer in region.buffers]
        is_alive_before = min(first for first, _ in spans) < self._backward
        is_alive_after = max(last for _, last in spans) >= self._backward
        if when == "update" and origins & OPTIMIZER:
            # With `memory.update: during` the boundaries of layers are written outside of `jvp`.
            is_saved = is_alive_before and is_alive_after and origins & BATCH
            return ("activations", SAVED, False) if is_saved else ("gradients", UPDATES, False)
        if when == "forward" and is_alive_after:
            return "activations", SAVED, False
        return "activations", "attention" if purpose == "attention" else "intermediates", False


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
    known = KnownShapes()
    sharded = set[Dims]()

    def add(axes: Axes, leaf: Any, gradient: Any) -> None:
        stored, split, used, moments = (
            _shard(built.layout, role, axes, leaf.shape) for role in ("weights", "gradients", "compute", "optimizer")
        )
        known.stored.update(sorted_dims(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(leaf))
        has_layers = is_stacked(axes)
        if gradient is not None:
            for dims in (stored, split, used, moments, leaf.shape):
                count = dims[:1] if gradient.shape == leaf.shape else gradient.shape[:1]  # some layers may be frozen
                shapes = ((*count, *dims[1:]), dims[1:]) if has_layers else (dims,)
                known.gradients.update(map(sorted_dims, shapes))
        if not has_layers:
            return
        known.layers = max(known.layers, stored[0])
        sharded.update(stacked_dims(dims) for dims in (stored, split) if dims != used)
        if used != stored:
            known.full_weights.add(stacked_dims(used))
        if gradient is not None:
            known.stacked_sizes.add(math.prod(split))
        if gradient is not None and used != split:
            known.full_gradients.add(stacked_dims(used))

    params = built.spec.state.params
    jax.tree.map(add, built.model.axes, params, built.model.select(params), is_leaf=is_axes)
    known.full_weights -= sharded
    known.full_gradients -= sharded
    return known


def _shard(layout: Layout, role: Role, axes: Axes, shape: Dims) -> Dims:
    """The shape of one device's shard of a weight in a role, padded if its dimensions are not divisible."""
    padded = layout.padded(role, axes, shape)
    return layout.sharding(role, axes, padded).shard_shape(padded)
