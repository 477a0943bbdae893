"""Shapes of a program's weights and gradients on one device, by which temporaries of a compiled step are recognized."""

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax

from jaxmem.sharding import Axes, is_axes
from jaxmem.step import Program

Dims = tuple[int, ...]


@dataclass(frozen=True)
class KnownShapes:
    stored: frozenset[Dims]  # weights as they are stored, layers stacked
    gradients: frozenset[Dims]  # all shapes of gradients: sharded or gathered, of one layer or stacked
    stacked_sizes: frozenset[int]  # numbers of elements of stacked gradients, for buffers that XLA reshaped
    full_weights: frozenset[Dims]  # all layers of a sharded weight, gathered; without shapes of sharded arrays
    full_gradients: frozenset[Dims]
    layers: int | None = None  # number of layers of a stack on one device


def sorted_dims(dims: Iterable[int]) -> Dims:
    """The dimensions above 1, sorted: the same for an array and its transposes.

    >>> sorted_dims((1, 512, 32, 4096))
    (32, 512, 4096)
    """
    return tuple(sorted(d for d in dims if d != 1))


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
        is_stacked = axes[:1] == ("layer",)
        has_gradient = trainable is not None
        if has_gradient:
            for dims in (stored, split, used, moments, leaf.shape):
                count = dims[:1] if trainable.shape == leaf.shape else trainable.shape[:1]  # some layers may be frozen
                shapes = ((*count, *dims[1:]), dims[1:]) if is_stacked else (dims,)
                shapes_by_kind["gradients"].update(map(sorted_dims, shapes))
        if not is_stacked:
            return
        shapes_by_kind["layers"].add(stored[0])
        shapes_by_kind["sharded"].update(sorted_dims(dims) for dims in (stored, split) if dims != used)
        shapes_by_kind["full_weights"].update({sorted_dims(used)} if used != stored else ())
        if has_gradient:
            shapes_by_kind["stacked_sizes"].add(math.prod(split))
            shapes_by_kind["full_gradients"].update({sorted_dims(used)} if used != split else ())

    jax.tree.map(add, built.model.axes, params, built.model.select(params), is_leaf=is_axes)
    return KnownShapes(
        frozenset(shapes_by_kind["stored"]),
        frozenset(shapes_by_kind["gradients"]),
        frozenset(shapes_by_kind["stacked_sizes"]),
        frozenset(shapes_by_kind["full_weights"] - shapes_by_kind["sharded"]),
        frozenset(shapes_by_kind["full_gradients"] - shapes_by_kind["sharded"]),
        max(shapes_by_kind["layers"], default=None),
    )
