"""One layer of each kind as jax traces it forward and back: what its backward pass makes again, whatever is kept.

The trace becomes one flat list of operations, forward and then backward. What the backward ones read of the forward
ones is either kept, or made again from what is. So for any set of names the bytes kept and the
arithmetic repeated follow exactly, without another trace: of an operation that several values need it is counted once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Literal

from jaxmem.config import Config, Decoder
from jaxmem.planning.passes import alone, inside, one_share, product, shape_of, unplaced
from jaxmem.sharding.weights import differentiable, with_gradients
from jaxmem.stack import StackCall, cut_by, inexact_leaves, with_inexact
from jaxmem.step.objective import objective

_BACK = "backward"  # the name of the gradient that comes in: with it the backward pass begins
_LOOPS, _PRODUCTS = ("scan", "while"), ("dot_general", "conv_general_dilated")


@dataclass(frozen=True)
class Operation:
    sources: tuple[int, ...]  # the operations whose results it reads
    products: int  # FLOPs
    numbers: int  # that it makes
    backward: bool
    name: str | None = None  # of what it makes, where that can be kept by name
    bytes: int = 0


@dataclass(frozen=True)
class Layer:
    """Of one row."""

    count: int  # layers of this kind
    boundary: int  # bytes of its input
    operations: list[Operation]
    wanted: frozenset[int]  # forward operations that the backward pass reads
    forward: int  # FLOPs of the forward pass
    _roads: dict[int, tuple[frozenset[int], frozenset[int]]] = field(default_factory=dict, repr=False)

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(one.name for one in self.operations if one.name))

    def kept(self, names: Collection[str]) -> tuple[int, int, int]:
        """With these names kept: bytes of those that the backward pass reads, FLOPs of the products that it repeats,
        and how many other numbers it makes again."""
        size, again = 0, frozenset[int]()
        todo, seen = [-1], set[int]()
        while todo:
            made, met = self._road(todo.pop())
            again |= made
            for number in met - seen:
                seen.add(number)
                if self.operations[number].name in names:
                    size += self.operations[number].bytes
                else:
                    todo.append(number)
        repeated = [self.operations[number] for number in again]
        return size, sum(one.products for one in repeated), sum(one.numbers for one in repeated if not one.products)

    def bytes_of(self, name: str) -> int:
        return sum(one.bytes for one in self.operations if one.name == name)

    def products_of(self, name: str) -> int:
        """FLOPs of what a value comes from, back to others with names."""
        own = [number for number, one in enumerate(self.operations) if one.name == name]
        made = frozenset[int]().union(*(self._road(number)[0] for number in own))
        return sum(self.operations[number].products for number in made)

    def _road(self, end: int) -> tuple[frozenset[int], frozenset[int]]:
        """What makes a value, or with -1 all that the backward pass reads: operations back to values with names, and
        those."""
        if end not in self._roads:
            made, met = set[int](), set[int]()
            todo = list(self.wanted if end < 0 else self.operations[end].sources)
            while todo:
                number = todo.pop()
                if self.operations[number].name:
                    met.add(number)
                elif number not in made:
                    made.add(number)
                    todo += self.operations[number].sources
            self._roads[end] = frozenset(made), frozenset(met)
        return self._roads[end]


def layers_of(cfg: Config, platform: str) -> list[Layer]:
    """A layer of each stack of a config whose mesh is filled in, of one row, on one of the devices that split it."""
    shape = shape_of(cfg, platform)
    memory = {"remat": "none", "offload": "none", "attention": "auto"}
    built = alone(one_share(shape.model_copy(update={"memory": shape.memory.model_copy(update=memory)}), cfg))
    loss, known = objective(built.cfg.objective, built.cfg.memory), cfg.model.activations
    params = jax.tree.map(unplaced, built.spec.state.params)
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), built.spec.batch)
    stream = (cfg.model.embed, cfg.mesh.tensor) if isinstance(cfg.model, Decoder) else (0, 1)
    found: list[Layer] = []

    def note(part: Any) -> tuple[Any, None] | None:
        if not isinstance(part, StackCall):
            return None
        found.append(_traced(part, _Flat(known, stream)))
        return part.x, None

    def features(params: Any, batch: Any) -> Any:
        with cut_by(note):
            weights = with_gradients(params, differentiable(built.model.select(params)))
            return loss.features(nnx.merge(built.model.graphdef, weights), batch, None)

    jax.eval_shape(features, params, batch)
    return found


def _traced(applied: StackCall, flat: _Flat) -> Layer:
    weights, one = (jax.tree.map(lambda x: unplaced(x[0]), tree) for tree in (applied.weights, applied.inputs))

    def both(g: Any, weights: Any, x: Any, one: Any, beside: Any) -> Any:
        run = lambda own, x: applied.run(with_inexact(weights, own), x, one, beside)[0]  # noqa: E731
        y, back = jax.vjp(run, inexact_leaves(weights), x)
        return back(checkpoint_name(g, _BACK)), y

    x, beside = jax.tree.map(unplaced, (applied.x, applied.beside))
    traced, (gradients, _) = jax.make_jaxpr(both, return_shape=True)(x, weights, x, one, beside)
    ends = flat.walk(traced.jaxpr, [None] * len(traced.jaxpr.invars))
    count = len(jax.tree.leaves(gradients))
    back = _reached(flat.operations, ends[:count], backward=True)
    wanted = {source for number in back for source in flat.operations[number].sources} - back
    wanted |= {end for end in ends[:count] if end is not None} - back
    forward = _reached(flat.operations, ends[count:], backward=False)
    return Layer(
        jax.tree.leaves((applied.weights, applied.inputs))[0].shape[0],
        sum(map(flat.bytes_of, jax.tree.leaves(x))),
        flat.operations,
        frozenset(wanted),
        sum(flat.operations[number].products for number in forward),
    )


def _reached(operations: list[Operation], ends: Iterable[int | None], *, backward: bool) -> set[int]:
    todo, found = [end for end in ends if end is not None], set[int]()
    while todo:
        number = todo.pop()
        if number not in found and operations[number].backward == backward:
            found.add(number)
            todo += operations[number].sources
    return found


class _Flat:
    """All operations of a trace, those within others among them; a loop is one."""

    def __init__(self, known: Collection[str], stream: tuple[int, int]) -> None:
        """`stream`: the width of what runs from layer to layer, and how many devices split its time."""
        self._known, self._stream = known, stream
        self._back = False
        self.operations: list[Operation] = []

    def bytes_of(self, x: Any) -> int:
        width, parts = self._stream
        whole: int = x.size * x.dtype.itemsize
        return whole // parts if x.shape[-1:] == (width,) else whole

    def walk(self, jaxpr: Any, given: list[int | None]) -> list[int | None]:
        """By number what makes the results. None: nothing does, it is there."""
        made: dict[Any, int | None] = dict(zip(jaxpr.invars, given, strict=True))

        def of(x: Any) -> int | None:
            return None if isinstance(x, Literal) else made.get(x)

        for eqn in jaxpr.eqns:
            sources = [of(x) for x in eqn.invars]
            inner = None if eqn.primitive.name in _LOOPS else _called(eqn)
            if inner is not None:
                made |= zip(eqn.outvars, self.walk(inner, sources), strict=True)
                continue
            made |= dict.fromkeys(eqn.outvars, len(self.operations))
            self.operations.append(self._operation(eqn, tuple(one for one in sources if one is not None)))
        return [of(x) for x in jaxpr.outvars]

    def _operation(self, eqn: Any, sources: tuple[int, ...]) -> Operation:
        numbers = sum(getattr(x.aval, "size", 0) for x in eqn.outvars)
        name = eqn.params["name"] if eqn.primitive.name == "name" else None
        self._back |= name == _BACK
        if name in self._known and not self._back:
            return Operation(sources, 0, 0, backward=False, name=name, bytes=self.bytes_of(eqn.outvars[0].aval))
        return Operation(sources, _flops(eqn), numbers, self._back)


def _called(eqn: Any) -> Any:
    """The operations that an operation stands for."""
    for value in eqn.params.values():
        value = getattr(value, "jaxpr", value)
        if hasattr(value, "eqns") and len(value.invars) == len(eqn.invars):
            return value
    return None


def _flops(eqn: Any) -> int:
    """Of a product, or of those in a loop."""
    if eqn.primitive.name in _PRODUCTS:
        return product(eqn, 1).flops
    if eqn.primitive.name not in _LOOPS:
        return 0
    return sum(product(one, n).flops * n for one, n in inside(eqn, 1) if one.primitive.name in _PRODUCTS)
