"""The operations that the backward pass recomputes if some names are saved, from a trace of one layer of each kind.

The trace becomes one flat list of operations, forward and then backward. A forward value that the backward pass reads
is either saved, or recomputed from saved values. So the saved bytes and the repeated FLOPs of any set of names are
computed exactly, without another trace; an operation that several values need counts once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Literal

from jaxmem.config import Config, Decoder
from jaxmem.estimate.passes import (
    KERNELS,
    LOOPS,
    MATMULS,
    cost_of,
    inner_traces,
    inside,
    on_one_device,
    shape_of,
    with_recomputed_experts,
    without_sharding,
)
from jaxmem.sharding.share import share_of
from jaxmem.sharding.weights import differentiable, with_gradients
from jaxmem.stack.apply import checkpointed
from jaxmem.stack.call import StackCall, intercept_with
from jaxmem.stack.scheduled import inexact_leaves, with_inexact
from jaxmem.typing import Tree

_BACK = "backward"  # the name of the incoming gradient, with which the backward pass begins


@dataclass(frozen=True)
class LayerOperation:
    sources: tuple[int, ...]  # numbers of the operations whose results it reads
    flops: int  # FLOPs of its matmuls
    elements: int  # number of elements of its results
    backward: bool
    name: str | None = None  # the checkpoint name of its result; None: it has no name
    bytes: int = 0


@dataclass(frozen=True)
class Layer:
    """The operations of one layer on one sequence."""

    count: int  # layers of this kind
    boundary: int  # bytes of the input of the layer
    operations: list[LayerOperation]
    needed: frozenset[int]  # forward operations that the backward pass reads
    forward: int  # FLOPs of the forward pass

    def saving(self, names: Collection[str]) -> tuple[int, int, int]:
        """If these names are saved: bytes of the saved values that the backward pass reads, FLOPs of the matmuls that
        it repeats, and the number of elements of other results that it recomputes."""
        repeated, known = _sources(self.operations, self.needed, lambda operation: operation.name in names)
        recomputed = [self.operations[number] for number in repeated]
        size = sum(self.operations[number].bytes for number in known)
        return (
            size,
            sum(operation.flops for operation in recomputed),
            sum(operation.elements for operation in recomputed if not operation.flops),
        )


def _sources(
    operations: Sequence[LayerOperation], ends: Iterable[int | None], is_known: Callable[[LayerOperation], bool]
) -> tuple[set[int], set[int]]:
    """The numbers of the operations that compute the results `ends` from known results, and the numbers of the
    operations that these known results come from. None in `ends` is an input."""
    todo = [end for end in ends if end is not None]
    numbers = set[int]()
    known = set[int]()
    while todo:
        number = todo.pop()
        if is_known(operations[number]):
            known.add(number)
        elif number not in numbers:
            numbers.add(number)
            todo += operations[number].sources
    return numbers, known


def layers_of(cfg: Config, platform: str) -> list[Layer]:
    """One layer of each stack of a config whose mesh is resolved, for one sequence, on one of the devices that shard
    the sequence."""
    shape = shape_of(cfg, platform).replace(memory={"remat": "none", "offload": "none", "attention": "auto"})
    if cfg.mesh.expert > 1:
        shape = with_recomputed_experts(shape)
    built = on_one_device(shape.replace(model=share_of(cfg).part_of_model))
    params = jax.tree.map(without_sharding, built.spec.state.params)
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), built.spec.batch)
    stream = (cfg.model.embed, cfg.mesh.tensor) if isinstance(cfg.model, Decoder) else (0, 1)
    layers: list[Layer] = []

    def note(part: Any) -> tuple[Any, None] | None:
        if not isinstance(part, StackCall):
            return None
        layers.append(_trace(checkpointed(part, part.layers), _Operations(cfg.model.activations, stream)))
        return part.x, None

    def features(params: Tree, batch: Any) -> Any:
        with intercept_with(note):
            weights = with_gradients(params, differentiable(built.model.select(params)))
            return built.objective.features(built.model.bind(weights), batch, None)

    jax.eval_shape(features, params, batch)
    return layers


def _trace(applied: StackCall, trace: _Operations) -> Layer:
    weights, layer_input = (
        jax.tree.map(lambda x: without_sharding(x[0]), tree) for tree in (applied.weights, applied.inputs)
    )

    def both(g: Any, weights: Tree, x: Tree, layer_input: Tree, shared: Tree) -> Any:
        run = lambda arrays, x: applied.run(with_inexact(weights, arrays), x, layer_input, shared)[0]  # noqa: E731
        y, back = jax.vjp(run, inexact_leaves(weights), x)
        return back(checkpoint_name(g, _BACK)), y

    x, shared = jax.tree.map(without_sharding, (applied.x, applied.shared))
    traced, (gradients, _) = jax.make_jaxpr(both, return_shape=True)(x, weights, x, layer_input, shared)
    ends = trace.add(traced.jaxpr, [None] * len(traced.jaxpr.invars))
    operations = trace.operations
    count = len(jax.tree.leaves(gradients))
    _, needed = _sources(operations, ends[:count], lambda operation: not operation.backward)
    forward, _ = _sources(operations, ends[count:], lambda operation: operation.backward)
    return Layer(
        jax.tree.leaves((applied.weights, applied.inputs))[0].shape[0],
        sum(map(trace.bytes_of, jax.tree.leaves(x))),
        operations,
        frozenset(needed),
        sum(operations[number].flops for number in forward),
    )


class _Operations:
    """All operations of a trace, nested ones included; a loop is one operation."""

    def __init__(self, known: Collection[str], stream: tuple[int, int]) -> None:
        """`stream`: the width of the residual stream, and the number of devices that its sequence is sharded over."""
        self._known = known
        self._stream = stream
        self._back = False
        self.operations: list[LayerOperation] = []

    def bytes_of(self, x: Tree) -> int:
        width, parts = self._stream
        size: int = x.size * x.dtype.itemsize
        return size // parts if x.shape[-1:] == (width,) else size

    def add(self, jaxpr: Any, inputs: list[int | None]) -> list[int | None]:
        """The numbers of the operations that compute the results; None for an input."""
        producers: dict[Any, int | None] = dict(zip(jaxpr.invars, inputs, strict=True))

        def maker(x: Tree) -> int | None:
            return None if isinstance(x, Literal) else producers.get(x)

        for eqn in jaxpr.eqns:
            sources = [maker(x) for x in eqn.invars]
            calls = () if eqn.primitive.name in LOOPS else inner_traces(eqn)
            inner = next((trace for trace in calls if len(trace.invars) == len(eqn.invars)), None)
            if inner is not None:
                producers |= zip(eqn.outvars, self.add(inner, sources), strict=True)
                continue
            producers |= dict.fromkeys(eqn.outvars, len(self.operations))
            self.operations.append(self._operation(eqn, tuple(source for source in sources if source is not None)))
        return [maker(x) for x in jaxpr.outvars]

    def _operation(self, eqn: Any, sources: tuple[int, ...]) -> LayerOperation:
        name = eqn.params["name"] if eqn.primitive.name == "name" else None
        self._back |= name == _BACK
        if name in self._known and not self._back:
            return LayerOperation(sources, 0, 0, backward=False, name=name, bytes=self.bytes_of(eqn.outvars[0].aval))
        elements = sum(getattr(x.aval, "size", 0) for x in eqn.outvars)
        parts = [(eqn, 1), *(inside(eqn, 1) if eqn.primitive.name in LOOPS else ())]  # (operation, number of runs)
        flops = round(
            sum(
                cost_of(operation, times).flops * times
                for operation, times in parts
                if operation.primitive.name in (*MATMULS, *KERNELS)
            )
        )
        return LayerOperation(sources, flops, elements, self._back)
