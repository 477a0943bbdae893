"""What the bytes of one device are: every buffer of a compiled program at its fullest moment, named and sorted.

Arguments are known by their paths. A temporary is sorted by what it was computed from, by its shape, by the pass
that made it and by the source file that it came from. Nothing is estimated: the parts are sums of buffers, and
what no buffer accounts for (gaps between buffers, tables of pointers) is `other`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax

from jaxmem.planning.buffers import Allocation, Held, Lifetimes, Moment, fullest, read_allocations
from jaxmem.planning.hlo import Frame, Instruction, Module, Shape, dot_flops
from jaxmem.planning.origins import BATCH, NOWHERE, OPTIMIZER, OTHER, WEIGHTS, Origins, at, trace_origins
from jaxmem.sharding import Axes, is_axes
from jaxmem.step import Program

PARTS = ("parameters", "quantization", "master", "optimizer", "gradients", "activations", "batch", "other")
Form = tuple[int, ...]
# Kinds of activations.
SAVED, LOGITS, ALL_SCORES = "saved for the backward pass", "logits", "attention: all scores"
GATHERED, COPIES = "weights: gathered or cast", "weights: copies"
UPDATES = "updates"
STATE_COPIES = "working copies"  # of the optimizer's state
_SUMS = ("summed or scaled", UPDATES)  # before the optimizer and after it
_MASTER = re.compile(r"^state\.opt_state.*\.master\b")  # of `optim.with_master`
_CONSTANTS = re.compile(r"^(state\.)?params\b.*\.(scale|offset)\b")  # of weights in codes
_ROLES = {WEIGHTS: "parameters", OPTIMIZER: "optimizer", BATCH: "batch", OTHER: "other", NOWHERE: "other"}


@dataclass(frozen=True)
class Item:
    """A named buffer."""

    part: str
    kind: str  # within its part: "logits", "saved for the backward pass", ...
    size: int
    what: str  # an argument's path, or a temporary's shape
    made_by: str  # jax's name of the operation, where it has one
    shape: Shape
    held: Held | None = None  # of a temporary


@dataclass(frozen=True)
class Known:
    """Shapes that tell what an array is: dimensions on one device, as `form` gives them."""

    resting: frozenset[Form]  # weights as they are stored, layers stacked
    gradients: frozenset[Form]  # any form a gradient takes: split or whole, of one layer or stacked
    stacked_sizes: frozenset[int]  # elements of stacked gradients, for buffers that XLA gave another shape
    whole_weights: frozenset[Form]  # all layers of a weight that the layout splits, unsplit; no part has that form
    whole_gradients: frozenset[Form]
    time: int | None = None  # positions of a sequence
    layers: int | None = None  # that a device holds of a stack


def form(dims: Iterable[int]) -> Form:
    """Dimensions up to transposition.

    >>> form((1, 512, 32, 4096))
    (32, 512, 4096)
    """
    return tuple(sorted(d for d in dims if d != 1))


@dataclass(frozen=True)
class Breakdown:
    """A compiled program's memory on one device."""

    module: Module
    allocations: Sequence[Allocation]
    known: Known

    @cached_property
    def items(self) -> list[Item]:
        """Every named buffer at the fullest moment, largest first."""
        items = list(self.lasting())
        for _, moment in self.fullest:
            items += [self.item(held) for held in moment.held]
            items.append(Item("other", "gaps between buffers", moment.unused, "", "", Shape("", 0)))
        return sorted((item for item in items if item.size), key=lambda item: -item.size)

    def of_part(self, part: str) -> int:
        return sum(item.size for item in self.items if item.part == part)

    def on_host(self, *parts: str) -> int:
        """Bytes of arguments that rest in host memory."""
        return sum(item.size for item in self._arguments(on_host=True) if item.part in parts)

    def of_kind(self, kind: str) -> int:
        return sum(item.size for item in self.items if item.kind == kind)

    @cached_property
    def lifetimes(self) -> Lifetimes:
        return Lifetimes(self.module)

    @cached_property
    def fullest(self) -> list[tuple[Allocation, Moment]]:
        """Where temporaries lie, and the moment when most of that is in use. XLA packs all into one allocation."""
        temporaries = [one for one in self.allocations if one.kind == "temporary" and not one.on_host]
        return [(one, fullest(one, self.lifetimes)) for one in temporaries]

    def lasting(self) -> Iterator[Item]:
        """What is there from the first moment of the step to the last."""
        yield from self._arguments()
        yield from self._outputs()

    @cached_property
    def _origins(self) -> dict[Instruction, object]:
        return trace_origins(self.module, lambda one: role(one.op_name))

    @cached_property
    def _backward(self) -> int:
        """When the backward pass begins: with the first matrix product in it."""
        products = (
            time for time, one in enumerate(self.lifetimes.moments)
            if pass_of(one.op_name) == "backward" and (dot_flops(one) or any(map(dot_flops, inside(one))))
        )  # fmt: skip
        return next(products, self.lifetimes.end)

    def _arguments(self, *, on_host: bool = False) -> Iterator[Item]:
        parameters = (one for one in self.module.entry.instructions if one.opcode == "parameter")
        inputs: dict[int | None, Instruction] = {one.number: one for one in parameters}
        for one in self.allocations:
            if one.kind == "argument" and one.on_host == on_host:
                path, shape = inputs[one.parameter].op_name, inputs[one.parameter].shape
                yield Item(part_of(path), "argument", one.size, path, "", shape)

    def _outputs(self) -> Iterator[Item]:
        for one in self.allocations:
            if one.kind == "output" and not one.on_host:
                largest = max(one.buffers, key=lambda buffer: buffer.size)
                yield Item("other", "result", one.size, str(largest.shape), largest.made_by.op_name, largest.shape)

    def item(self, held: Held) -> Item:
        """A temporary, sorted by the most telling of the names that its buffers have."""
        names = [(maker_of(one, index), one, index) for buffer in held.buffers for one, index in buffer.names]
        maker = max((name[0] for name in names), key=tells)
        shape = max((buffer.shape for buffer in held.buffers), key=lambda shape: shape.bytes)
        origins = NOWHERE
        for _, place, element in names:
            origins |= at(self._origins.get(place, NOWHERE), element)
        part, kind = self._sorted(held, maker, shape, origins)
        return Item(part, kind, held.size, str(shape), maker.op_name, shape, held)

    def _sorted(self, held: Held, maker: Instruction, shape: Shape, origins: Origins) -> tuple[str, str]:
        dims, when = form(shape.dims), pass_of(maker.op_name)
        if origins == WEIGHTS:
            return "activations", COPIES if dims in self.known.resting else GATHERED
        if origins and not origins & ~(OPTIMIZER | OTHER):
            return "optimizer", STATE_COPIES
        if when != "forward" and origins & BATCH and self._is_gradient(dims, shape):
            return "gradients", "of one backward pass" if when == "backward" else _SUMS[bool(origins & OPTIMIZER)]
        if when == "update" and origins & OPTIMIZER:
            return "gradients", _SUMS[True]
        if of_logits(maker.frames):
            return "activations", LOGITS
        if dims.count(self.known.time or 0) > 1 and any("attention/reference" in frame.file for frame in maker.frames):
            return "activations", ALL_SCORES
        if when == "forward" and self._is_saved(held):
            return "activations", SAVED
        if any("kernels/attention" in frame.file for frame in maker.frames):
            return "activations", "attention"
        return "activations", "intermediates"

    def _is_gradient(self, dims: Form, shape: Shape) -> bool:
        return len(dims) > 0 and (dims in self.known.gradients or shape.elements in self.known.stacked_sizes)

    def _is_saved(self, held: Held) -> bool:
        """Made in the forward pass and needed after it."""
        return max(self.lifetimes.of(buffer)[1] for buffer in held.buffers) >= self._backward


def known_shapes(built: Program) -> Known:
    """Of a program's weights and gradients, from its layout."""
    resting: set[Form] = set()
    gradients: set[Form] = set()
    whole_weights: set[Form] = set()
    whole_gradients: set[Form] = set()
    parts: set[Form] = set()  # of stacked weights and gradients
    sizes: set[int] = set()
    layers: set[int] = set()
    params = built.state.params
    learned = built.chosen(params)  # the others have no gradient

    def add(axes: Axes, leaf: Any, own: Any) -> None:
        stored, split, used, moments = (
            built.layout.sharding(role, axes, shape).shard_shape(shape)
            for role in ("weights", "gradients", "computing", "optimizer")
            for shape in (built.layout.padded(role, axes, leaf.shape),)
        )
        resting.update(form(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(leaf))
        stacked = axes[:1] == ("layer",)
        for dims in (stored, split, used, moments, leaf.shape) if own is not None else ():
            count = dims[:1] if own.shape == leaf.shape else own.shape[:1]  # of a stack some layers may learn
            gradients.update({form((*count, *dims[1:])), form(dims[1:])} if stacked else {form(dims)})
        if stacked and own is not None:
            sizes.add(math.prod(split))
            whole_gradients.update({form(used)} if used != split else ())
        if stacked:
            parts.update(form(dims) for dims in (stored, split) if dims != used)
            layers.add(stored[0])
            whole_weights.update({form(used)} if used != stored else ())

    jax.tree.map(add, built.axes, params, learned, is_leaf=is_axes)
    time = built.cfg.time if built.cfg.objective.reads_text else None
    return Known(
        frozenset(resting),
        frozenset(gradients),
        frozenset(sizes),
        frozenset(whole_weights - parts),
        frozenset(whole_gradients - parts),
        time,
        max(layers, default=None),
    )


def role(path: str) -> Origins:
    """What an argument of a program is, by the path that jax gives it."""
    if path.startswith(("state.params", "params")):
        return WEIGHTS
    if path.startswith("state.opt_state"):
        return OPTIMIZER
    return BATCH if path.startswith("batch") else OTHER


def part_of(path: str) -> str:
    """Which of PARTS an argument belongs to.

    >>> [part_of(f"state.{path}") for path in ("params['w'].codes", "params['w'].scale", "opt_state.master['w']")]
    ['parameters', 'quantization', 'master']
    """
    if _MASTER.search(path):
        return "master"
    return "quantization" if _CONSTANTS.search(path) else _ROLES[role(path)]


def pass_of(op_name: str) -> str:
    """Which pass of a training step an operation belongs to.

    >>> [pass_of(f"jit(step)/{name}") for name in ("jvp()/add", "transpose(jvp())/while/body/dot_general", "mul")]
    ['forward', 'backward', 'update']
    """
    if "transpose(" in op_name or "rematted_computation" in op_name:
        return "backward"
    return "forward" if "jvp(" in op_name else "update"


def inside(one: Instruction) -> Iterator[Instruction]:
    """The instructions of a fusion, of a loop's body, of what an instruction calls."""
    for called in one.called:
        for inner in called.instructions:
            yield inner
            yield from inside(inner)


def of_logits(frames: Sequence[Frame]) -> bool:
    """Whether the loss, or the product before it, made something."""
    return any(
        frame.file.endswith(("jaxmem/models/losses.py", "jaxmem/models/vocab_loss.py"))
        or frame.function.endswith(".logits")
        for frame in frames
    )


def tells(maker: Instruction) -> tuple[bool, bool, bool]:
    """What fills a buffer tells more than what set it to zero."""
    return "dynamic_update_slice" in maker.op_name, bool(maker.frames), maker.op_name.startswith("jit(")


def maker_of(one: Instruction, index: tuple[int, ...]) -> Instruction:
    """The instruction that jax knows: within a fusion the one that gives this element, before a copy its source."""
    for _ in range(8):
        if one.is_fusion:
            root = one.called[0].root
            inner = root.operands[index[0]] if root.opcode == "tuple" and index else root
            while not inner.frames and inner.opcode != "parameter" and inner.operands:
                inner = inner.operands[0]
            if inner.frames:
                return inner
            if inner.opcode == "parameter" and not one.frames:
                one, index = one.operands[inner.number], ()
                continue
        if one.frames or not one.operands:
            return one
        one, index = one.operands[0], ()
    return one


def breakdown(module: Module, assignment: bytes, known: Known) -> Breakdown:
    return Breakdown(module, read_allocations(module, assignment), known)
