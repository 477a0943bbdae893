"""Shapes of a program's weights and gradients on one device, by which a compiled step's temporaries are recognized."""

from __future__ import annotations

import math
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
    gradients: frozenset[Dims]  # every shape that a gradient takes: sharded or whole, of one layer or stacked
    stacked_sizes: frozenset[int]  # elements of stacked gradients, for buffers that XLA gave another shape
    whole_weights: frozenset[Dims]  # all layers of a sharded weight, gathered; no sharded array has this shape
    whole_gradients: frozenset[Dims]
    time: int | None = None  # positions of a sequence
    layers: int | None = None  # of a stack on one device


def sorted_dims(dims: Iterable[int]) -> Dims:
    """Dimensions up to transposition.

    >>> sorted_dims((1, 512, 32, 4096))
    (32, 512, 4096)
    """
    return tuple(sorted(d for d in dims if d != 1))


def known_shapes(built: Program) -> KnownShapes:
    """The shapes of a program's weights and gradients, from its layout."""
    stored_dims: set[Dims] = set()
    gradients: set[Dims] = set()
    whole_weights: set[Dims] = set()
    whole_gradients: set[Dims] = set()
    sharded: set[Dims] = set()  # stacked weights and gradients
    sizes: set[int] = set()
    layers: set[int] = set()
    params = built.spec.state.params

    def add(axes: Axes, leaf: Any, trainable: Any) -> None:
        stored, split, used, moments = (
            built.layout.sharding(role, axes, shape).shard_shape(shape)
            for role in ("weights", "gradients", "compute", "optimizer")
            for shape in (built.layout.padded(role, axes, leaf.shape),)
        )
        stored_dims.update(sorted_dims(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(leaf))
        is_stacked = axes[:1] == ("layer",)
        for dims in (stored, split, used, moments, leaf.shape) if trainable is not None else ():
            count = dims[:1] if trainable.shape == leaf.shape else trainable.shape[:1]  # some layers may be frozen
            one_layer = {sorted_dims((*count, *dims[1:])), sorted_dims(dims[1:])}
            gradients.update(one_layer if is_stacked else {sorted_dims(dims)})
        if is_stacked and trainable is not None:
            sizes.add(math.prod(split))
            whole_gradients.update({sorted_dims(used)} if used != split else ())
        if is_stacked:
            sharded.update(sorted_dims(dims) for dims in (stored, split) if dims != used)
            layers.add(stored[0])
            whole_weights.update({sorted_dims(used)} if used != stored else ())

    jax.tree.map(add, built.model.axes, params, built.model.select(params), is_leaf=is_axes)
    return KnownShapes(
        frozenset(stored_dims),
        frozenset(gradients),
        frozenset(sizes),
        frozenset(whole_weights - sharded),
        frozenset(whole_gradients - sharded),
        built.cfg.row_length if built.cfg.objective.reads_text else None,
        max(layers, default=None),
    )
