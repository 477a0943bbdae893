"""What layers call their values: the bytes that each takes where it is kept, and the arithmetic of making it again.

From one trace of a layer, in a second; nothing is compiled. Made again is a value from those with names that it comes
from, so that what keeps several of them spares the sum of their products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from jax.extend.core import Literal
from rich.table import Table

from jaxmem.config import Config
from jaxmem.config.names import NAMES
from jaxmem.planning.passes import alone, equations, product, rows_of, shape_of, unplaced
from jaxmem.planning.targets import local_target, parse_target
from jaxmem.planning.text import readable
from jaxmem.program.objective import objective

_LOOPS, _PRODUCTS = ("scan", "while"), ("dot_general", "conv_general_dilated")
_Made = frozenset[int]  # the products that a value comes from, back to values with names


@dataclass(frozen=True)
class Named:
    name: str
    layers: int
    bytes: int  # of one layer, for a device's rows of a micro-batch
    flops: int

    def as_json(self) -> dict[str, Any]:
        return {"name": self.name, "layers": self.layers, "bytes_per_layer": self.bytes, "flops_per_layer": self.flops}


def names(cfg: Config, target: str | None = None) -> list[Named]:
    """For a device of a target, by default of this machine; what `mesh.tensor` splits is counted whole."""
    aim = local_target(jax.devices()) if target is None else parse_target(target)
    cfg = cfg.for_devices(aim.count)
    shape = shape_of(cfg, "cpu" if aim.is_cpu else "gpu")
    memory = {"remat": "none", "offload": "none", "attention": "auto", "mlp_chunk": "auto", "head_groups": "auto"}
    built = alone(shape.model_copy(update={"memory": shape.memory.model_copy(update=memory)}))
    loss = objective(built.cfg.objective, built.cfg.memory)
    params = jax.tree.map(unplaced, built.state.params)
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), built.batch)
    traced = jax.make_jaxpr(lambda params, batch: loss(nnx.merge(built.graphdef, params), batch, None))(params, batch)
    known, rows = NAMES[cfg.model.family], rows_of(cfg)
    found: dict[str, Named] = {}
    for loop, _ in equations(traced.jaxpr, 1):
        if loop.primitive.name != "scan" or not _says(loop.params["jaxpr"].jaxpr, known):
            continue
        layer = _Layer(known)
        layer.walk(loop.params["jaxpr"].jaxpr, [frozenset()] * len(loop.invars))
        for name, (size, made) in layer.said.items():
            flops = sum(layer.flops[number] for number in made)
            found[name] = Named(name, loop.params["length"], round(rows * size), round(rows * flops))
    return list(found.values())


def names_table(found: Sequence[Named]) -> Table:
    drawn = Table(title="Values of one layer on one device, for memory.remat: {save: [names]}", title_justify="left")
    for column in ("", "kept", "of all layers", "FLOPs to make it again"):
        drawn.add_column(column, justify="right" if column else "left", no_wrap=True)
    for one in found:
        drawn.add_row(one.name, readable(one.bytes), readable(one.bytes * one.layers), f"{one.flops:.3g}")
    return drawn


def _says(jaxpr: Any, known: Sequence[str]) -> bool:
    return any(eqn.primitive.name == "name" and eqn.params["name"] in known for eqn, _ in equations(jaxpr, 1))


class _Layer:
    """Goes through one layer's operations, and those that they call."""

    def __init__(self, known: Sequence[str]) -> None:
        self._known = known
        self.flops: list[int] = []  # of each product
        self.said: dict[str, tuple[int, _Made]] = {}

    def walk(self, jaxpr: Any, given: Sequence[_Made]) -> list[_Made]:
        made: dict[Any, _Made] = dict(zip(jaxpr.invars, given, strict=True))

        def of(x: Any) -> _Made:
            return frozenset() if isinstance(x, Literal) else made.get(x, frozenset())

        for eqn in jaxpr.eqns:
            sources = [of(x) for x in eqn.invars]
            whole = frozenset().union(*sources)
            inner = None if eqn.primitive.name in _LOOPS else _called(eqn)
            if inner is not None:
                made |= zip(eqn.outvars, self.walk(inner, sources), strict=True)
                continue
            if eqn.primitive.name == "name" and eqn.params["name"] in self._known:
                self._say(eqn, whole)
                whole = frozenset()
            elif flops := _flops(eqn):
                whole |= {len(self.flops)}
                self.flops.append(flops)
            made |= dict.fromkeys(eqn.outvars, whole)
        return [of(x) for x in jaxpr.outvars]

    def _say(self, eqn: Any, whole: _Made) -> None:
        size, before = self.said.get(eqn.params["name"], (0, frozenset()))
        aval = eqn.outvars[0].aval
        self.said[eqn.params["name"]] = size + aval.size * aval.dtype.itemsize, before | whole


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
    body = eqn.params["body_jaxpr" if eqn.primitive.name == "while" else "jaxpr"].jaxpr
    inside = equations(body, eqn.params.get("length", 1))
    return sum(product(one, times).flops * times for one, times in inside if one.primitive.name in _PRODUCTS)
