"""The tables: for each role that an array plays, which mesh axes split which of its logical axes."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jaxmem import config
from jaxmem.config import Config
from jaxmem.config.dimensions import undivided

Axes = tuple[str | None, ...]  # a logical name for each dimension; None: nothing may split it
Table = Mapping[str, tuple[str, ...]]  # logical axis -> the mesh axes that split it; (): whole
Role = Literal["weights", "computing", "gradients", "optimizer", "activations"]


def is_axes(x: Any) -> bool:
    """A tuple of axis names, not one of optax's tuples of states."""
    return type(x) is tuple and all(a is None or isinstance(a, str) for a in x)


USUAL: Table = config.Rules().table
RESTING = ("fsdp", "context")  # split what rests; where it is computed with it is whole over them

ALSO = "+"  # ends the name of an axis that rests split over `RESTING` too, where that comes out even
IF_EVEN = "?"  # ends the name of an axis that is split where that comes out even, and whole otherwise


@dataclass(frozen=True)
class Rules:
    """For each role, which mesh axes split which logical axis. Every axis is listed: `()` is whole."""

    weights: Table  # as they rest between steps
    computing: Table  # one layer's weights while it runs
    gradients: Table
    optimizer: Table
    activations: Table


def rules(zero: int, undivided: Collection[str] = (), dims: Table = USUAL) -> Rules:
    """The table of a ZeRO stage: 1 splits the optimizer's state over `fsdp`, 2 also gradients, 3 also weights.

    Devices along `context` compute with the same weights as those along `fsdp`, so what is split lies over both.
    `undivided`: axes that `tensor` does not divide. Key and value heads are then whole on each of its devices; a
    vocabulary is whole where it rests, and padded where it is computed with. `dims`: the config's own table. What
    `tensor` does not split is computed with whole, each device on its own part of the time.
    """
    own = "norm", "head_dim", "rank", "projected", "height", "width", "patch", "kernel", "channels", "classes"
    split: Table = {**dict.fromkeys(own, ()), "layer": ("stage",), **dims}
    if "kv_heads" in undivided:
        split = {**split, "kv_heads": _without(split["kv_heads"], "tensor")}
    padded = {axis: _without(over, *RESTING) for axis, over in split.items()}
    if "vocab" in undivided:
        split = {**split, "vocab": _without(split["vocab"], "tensor")}
    tensor = {axis: _without(over, *RESTING) for axis, over in split.items()}
    # What a gradient is projected to takes the place of what was projected away.
    state: Table = {**split, "projected": split["embed"]}
    activations: Table = {
        **padded,
        "layer": (),
        "accumulate": (),
        "batch": ("replica", "fsdp"),
        "time": ("context",),
        "stream": ("context", "tensor"),  # the time of what runs from layer to layer, and of its norms
        "mlp_time": ("context", *_without(("tensor",), *padded["mlp"])),
        "vocab_time": ("context", *_without(("tensor",), *padded["vocab"])),
    }
    return Rules(
        weights=split if zero >= 3 else tensor,
        computing=padded,
        gradients=split if zero >= 2 else tensor,
        optimizer=state if zero >= 1 else tensor,
        activations=activations,
    )


def _without(over: tuple[str, ...], *axes: str) -> tuple[str, ...]:
    return tuple(axis for axis in over if axis not in axes)


def named(axis: str) -> str:
    """
    >>> named("mlp"), named("mlp+"), named("mlp+?")
    ('mlp', 'mlp', 'mlp')
    """
    return axis.removesuffix(IF_EVEN).removesuffix(ALSO)


def splits(axes: Axes, shape: Sequence[int], table: Table, mesh: Mapping[str, int]) -> list[tuple[str, ...]]:
    """The mesh axes that split each dimension, as the table says and `+` and `?` allow. What two dimensions name, the
    first of them has. Where a `?` does not come out even over what splits resting weights, another dimension of a
    layer is split in its place, so that constants of blocks are not whole on each of many devices."""
    taken = {a for axis in axes if axis is not None and not axis.endswith(IF_EVEN) for a in table[named(axis)]}
    resting = [a for a in RESTING if any(a in over for over in table.values())]
    given: set[str] = set()
    found, left = [], []

    def even(size: int, over: tuple[str, ...]) -> bool:
        return size % math.prod(mesh[a] for a in over) == 0

    for axis, size in zip(axes, shape, strict=True):
        over = () if axis is None else _without(table[named(axis)], *given)
        if axis is not None and axis.endswith(IF_EVEN):
            over = _without(over, *taken)
        if axis is not None and ALSO in axis:
            more = (*over, *(a for a in resting if a not in over and a not in taken and a not in given))
            over = more if even(size, more) else over
        if axis is not None and axis.endswith(IF_EVEN) and not even(size, over):
            left += [a for a in over if a in resting]
            over = ()
        given.update(over)
        found.append(over)
    for a in _without(tuple(left), *given):
        others = (d for d, axis in enumerate(axes) if axis is not None and named(axis) not in ("layer", "vocab"))
        if (d := next((d for d in others if even(shape[d], (*found[d], a))), None)) is not None:
            found[d] = (*found[d], a)
    return found


def rules_of(cfg: Config) -> Rules:
    return rules(cfg.zero, undivided(cfg), cfg.rules.table)


def as_even(axes: Axes, shape: Sequence[int], whole: Sequence[int]) -> Axes:
    return tuple(
        axis if axis is None or size == full else axis + IF_EVEN
        for axis, size, full in zip(axes, shape, whole, strict=True)
    )
