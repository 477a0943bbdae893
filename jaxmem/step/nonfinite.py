"""Which gradient was the first that is no number: the weight's name, and its layer.

The sums of squares that the length of all gradients is made of are kept apart until it is known, one for each weight
and layer, a few hundred numbers. What is not finite passes from a layer to those before it: the first is the one that
the backward pass comes to first, the last layer and what follows the layers before all others.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem.sharding import Axes, is_axes

Some: TypeAlias = Mapping[Any, tuple[int, ...]]
ALL: Some = MappingProxyType({})

AFTER_LAYERS = ("head", "norm")  # what networks have between their layers and the loss


def names(axes: Any, sizes: Any, order: list[int] | None = None, some: Some = ALL) -> list[str]:
    """In the order of `squares`; `order` says which layer stands at each place of a stack."""
    after, stacks, before = _sorted(axes)
    lengths = {path: leaf.shape[0] for path, leaf in jax.tree_util.tree_leaves_with_path(sizes)}
    found = [_name(path) for path in after]
    for paths in stacks:
        for place, path in _turns(paths, lengths, some)[0]:
            layer = place if order is None else order[place]
            found.append(f"{_name(path)} of layer {layer}")
    return found + [_name(path) for path in before]


def squares(grads: Any, axes: Any, some: Some = ALL) -> jax.Array:
    """Of each weight and layer the sum, in float32. `some`: by their paths, stacks of which these layers have one."""

    def summed(names: Axes, g: jax.Array) -> jax.Array:
        return jnp.sum(jnp.square(g.astype(jnp.float32)), axis=range(int(names[:1] == ("layer",)), g.ndim))

    return in_order(jax.tree.map(summed, axes, grads, is_leaf=is_axes), axes, some)


def in_order(sums: Any, axes: Any, some: Some = ALL) -> jax.Array:
    """Sums of the weights' gradients, of a stack one for each layer, in the order of `names`."""
    found = dict(jax.tree_util.tree_leaves_with_path(sums))
    after, stacks, before = _sorted(axes)

    def by_layer(paths: list[Any]) -> jax.Array:
        lengths = {path: found[path].shape[0] for path in paths}
        every = jnp.concatenate([found[path] for path in paths])
        return every[np.asarray(_turns(paths, lengths, some)[1])]

    first, last = ([found[path].reshape(1) for path in paths] for paths in (after, before))
    return jnp.concatenate([*first, *map(by_layer, stacks), *last])


def _turns(paths: list[Any], lengths: dict[Any, int], some: Some) -> tuple[list[tuple[int, Any]], list[int]]:
    """A stack's layers and weights in the order in which the backward pass comes to them, and where each is among the
    weights' layers, one weight's after the other's."""
    every = [
        (layer, number, path)
        for number, path in enumerate(paths)
        for layer in some.get(path, tuple(range(lengths[path])))
    ]
    turns = sorted(range(len(every)), key=lambda at: (-every[at][0], every[at][1]))
    return [(every[at][0], every[at][2]) for at in turns], turns


def first(squares: jax.Array) -> jax.Array:
    """The place of the first that is not finite; -1: all are."""
    bad = ~jnp.isfinite(squares)
    return jnp.where(jnp.any(bad), jnp.argmax(bad), -1).astype(jnp.int32)


def _sorted(axes: Any) -> tuple[list[Any], list[list[Any]], list[Any]]:
    """Paths of what follows the layers, of each stack from the last one on, and of the rest."""
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
