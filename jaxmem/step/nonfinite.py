"""Finds the first gradient that is not finite: the name of its weight, and its layer.

The sums of squares for the gradient norm are returned per weight and layer, a few hundred numbers. Non-finite values
propagate from a layer to the layers before it, so the first one is the one that the backward pass computes first. The
order is: weights after the layers, then layers from the last to the first, then other weights.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem.sharding import Axes, is_axes

PartialStacks: TypeAlias = Mapping[Any, tuple[int, ...]]  # by path, the layers of a stack that have a gradient
WHOLE: PartialStacks = MappingProxyType({})

METRIC = "nonfinite"  # name of a metric: the index in `gradient_names` of the first gradient that is not finite, or -1
AFTER_LAYERS = ("head", "norm")  # modules of networks between the layers and the loss


def gradient_names(axes: Any, sizes: Any, order: list[int] | None = None, partial: PartialStacks = WHOLE) -> list[str]:
    """Names in the order of `squared_norms`. `order` is the layer that is stored at each position of a stack."""
    after, stacks, before = _sorted(axes)
    lengths = {path: leaf.shape[0] for path, leaf in jax.tree_util.tree_leaves_with_path(sizes)}
    names = [_name(path) for path in after]
    for paths in stacks:
        for position, path in _backward_order(paths, lengths, partial)[0]:
            layer = position if order is None else order[position]
            names.append(f"{_name(path)} of layer {layer}")
    return names + [_name(path) for path in before]


def squared_norms(grads: Any, axes: Any, partial: PartialStacks = WHOLE) -> jax.Array:
    """The sum of squares of the gradient of each weight (of each layer for stacks), in float32."""

    def one(names: Axes, g: jax.Array) -> jax.Array:
        return jnp.sum(jnp.square(g.astype(jnp.float32)), axis=range(int(names[:1] == ("layer",)), g.ndim))

    return in_order(jax.tree.map(one, axes, grads, is_leaf=is_axes), axes, partial)


def in_order(sums: Any, axes: Any, partial: PartialStacks = WHOLE) -> jax.Array:
    """The sums of squares, one per layer for stacks, in the order of `gradient_names`."""
    by_path = dict(jax.tree_util.tree_leaves_with_path(sums))
    after, stacks, before = _sorted(axes)

    def of_stack(paths: list[Any]) -> jax.Array:
        lengths = {path: by_path[path].shape[0] for path in paths}
        every = jnp.concatenate([by_path[path] for path in paths])
        return every[np.asarray(_backward_order(paths, lengths, partial)[1])]

    first, last = ([by_path[path].reshape(1) for path in paths] for paths in (after, before))
    return jnp.concatenate([*first, *map(of_stack, stacks), *last])


def first(squares: jax.Array) -> jax.Array:
    """The index of the first value that is not finite, or -1."""
    bad = ~jnp.isfinite(squares)
    return jnp.where(jnp.any(bad), jnp.argmax(bad), -1).astype(jnp.int32)


def _backward_order(
    paths: list[Any], lengths: dict[Any, int], partial: PartialStacks
) -> tuple[list[tuple[int, Any]], list[int]]:
    """The layers and weights of a stack in the order in which the backward pass computes their gradients, and the
    index of each in an array that has all layers of the first weight, then all layers of the next."""
    every = [
        (layer, number, path)
        for number, path in enumerate(paths)
        for layer in partial.get(path, tuple(range(lengths[path])))
    ]
    order = sorted(range(len(every)), key=lambda i: (-every[i][0], every[i][1]))
    return [(every[i][0], every[i][2]) for i in order], order


def _sorted(axes: Any) -> tuple[list[Any], list[list[Any]], list[Any]]:
    """Paths of the weights after the layers, of each stack beginning with the last one, and of all other weights."""
    after: list[Any] = []
    stacks: dict[Any, list[Any]] = {}
    before: list[Any] = []
    for path, own in jax.tree_util.tree_leaves_with_path(axes, is_leaf=is_axes):
        if own[:1] == ("layer",):
            stacks.setdefault(path[: [step.key for step in path].index("blocks")], []).append(path)
        else:
            (after if path[0].key in AFTER_LAYERS else before).append(path)
    return after, list(reversed(stacks.values())), before


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")
