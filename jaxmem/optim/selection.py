"""Trainable and frozen parameters, selected by patterns of their names.

A parameter is named by its path, `blocks.attention.q.weight`. Patterns are shell-style: `*.bias` (BitFit, Zaken et al.,
arXiv:2106.10199), `head.*`, `*norm*`. A Python slice selects layers of a stack: `blocks[-2:].*` are the last two,
`blocks[:4].mlp.*` the MLPs of the first four.

Frozen parameters have no optimizer state, which saves 8 bytes per parameter with Adam. Their gradients are not computed
unless they are used elsewhere, since XLA removes unused computations.

    tx = optim.trainable(optax.adam(1e-3), ["head.*"])
    state = tx.init(params)
    updates, state = tx.update(grads, state, params)     # zeros for frozen parameters
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import KeyPath

from jaxmem.config.names import count_layers, split_layers, split_stack
from jaxmem.errors import UserError, nearest
from jaxmem.sharding.table import is_axes, is_stacked, path_name
from jaxmem.sharding.weights import is_encoded
from jaxmem.typing import Tree


@dataclass(frozen=True)
class Selection:
    """The trainable parameters: for each path, the indices of the trainable layers, or None if all are trainable."""

    layers: Mapping[KeyPath, tuple[int, ...] | None]

    @classmethod
    def of(cls, tree: Tree, patterns: Sequence[str]) -> Selection:
        """The parameters that match. `tree` has weights, shapes or axes. With axes, a range selects all layers."""
        named = [(path, *split_stack(name), x) for path, name, x in _named(tree)]
        total = count_layers(name for _, name, _ in _named(tree))
        layers_of: dict[KeyPath, tuple[int, ...] | None] = {}
        for pattern in patterns:
            plain, layers = split_layers(pattern)
            matches = [(path, name, stack, x) for path, name, stack, x in named if fnmatchcase(name, plain)]
            if not matches:
                names = [name for _, name, *_ in named]
                raise UserError(f"optimizer.trainable: {plain} matches no parameter{nearest(plain, names)}")
            for path, name, stack, x in matches:
                indices = None if layers is None else _layers_in(x, name, pattern, layers, stack, total)
                known = layers_of.get(path, ())
                if indices != ():
                    layers_of[path] = None if indices is None or known is None else tuple(sorted({*known, *indices}))
        complete = {path for path, *_, x in named if (known := layers_of.get(path)) and len(known) == x.shape[0]}
        return cls({path: None if path in complete else known for path, known in layers_of.items()})

    def without(self, paths: Collection[tuple[str, ...]]) -> Selection:
        """The selection without the parameters at these paths."""
        return Selection({path: x for path, x in self.layers.items() if tuple(key.key for key in path) not in paths})

    def select(self, tree: Tree) -> Tree:
        """Replaces frozen parameters by None, and stacks by their trainable layers, in a tree of weights or axes."""

        def select_leaf(path: KeyPath, x: Tree) -> Any:
            if path not in self.layers:
                return None
            indices = self.layers[path]
            return x if indices is None or is_axes(x) else jax.tree.map(lambda x: _take_layers(x, indices), x)

        return jax.tree_util.tree_map_with_path(select_leaf, tree, is_leaf=_is_weight)

    def merge(self, tree: Tree, selected: Tree) -> Tree:
        """`tree`, with the trainable parameters replaced by those of `selected`."""
        new = {path: x for path, _, x in _named(selected)}

        def merge_leaf(path: KeyPath, x: Tree) -> Any:
            indices = self.layers.get(path)
            if path not in new or indices is None:
                return new.get(path, x)
            return jax.tree.map(lambda x, new: _put_layers(x, new, indices), x, new[path])

        return jax.tree_util.tree_map_with_path(merge_leaf, tree, is_leaf=_is_weight)

    @property
    def partial_stacks(self) -> dict[KeyPath, tuple[int, ...]]:
        """The stacks of which only some layers are trainable."""
        return {path: indices for path, indices in self.layers.items() if indices is not None}


def trainable(tx: optax.GradientTransformation, patterns: Sequence[str]) -> optax.GradientTransformationExtraArgs:
    """`tx` for the parameters whose names match; the updates of all others are zeros.

    An optimizer with `axes` needs the axes of the trainable weights: `select_trainable(axes, patterns)`.
    """
    inner = optax.with_extra_args_support(tx)

    def init(params: Tree) -> Tree:
        return inner.init(select_trainable(params, patterns))

    def update(grads: Tree, state: Tree, params: Tree = None, **extra: Any) -> tuple[Tree, Tree]:
        selection = Selection.of(grads, patterns)
        selected = None if params is None else selection.select(params)
        updates, state = inner.update(selection.select(grads), state, selected, **extra)
        zeros = jax.tree.map(lambda g, u: jnp.zeros_like(g, dtype=None if u is None else u.dtype), grads, updates)
        return selection.merge(zeros, updates), state

    return optax.GradientTransformationExtraArgs(init, update)


def scale_updates(
    tx: optax.GradientTransformation, factor: float, patterns: Sequence[str]
) -> optax.GradientTransformationExtraArgs:
    """`tx`, with the updates of matching parameters multiplied by a factor, e.g. the learning rate of B in LoRA+ (Hayou
    et al., arXiv:2402.12354)."""
    inner = optax.with_extra_args_support(tx)

    def update(grads: Tree, state: Tree, params: Tree = None, **extra: Any) -> tuple[Tree, Tree]:
        updates, state = inner.update(grads, state, params, **extra)

        def scaled(path: KeyPath, u: jax.Array) -> jax.Array:
            return u * factor if any(fnmatchcase(path_name(path), pattern) for pattern in patterns) else u

        return jax.tree_util.tree_map_with_path(scaled, updates), state

    return optax.GradientTransformationExtraArgs(inner.init, update)


def select_trainable(tree: Tree, patterns: Sequence[str]) -> Tree:
    """A tree of weights or axes with None for frozen parameters.

    >>> select_trainable({"a": {"bias": 1, "weight": 2}, "b": {"bias": 3}}, ["*.bias"])
    {'a': {'bias': 1, 'weight': None}, 'b': {'bias': 3}}
    """
    return Selection.of(tree, patterns).select(tree)


def _layers_in(
    x: Tree, name: str, pattern: str, layers: slice, stack: range | None, total: int
) -> tuple[int, ...] | None:
    """The positions of the selected layers in a stack with the layers `stack` (default: all), or None for axes."""
    if is_axes(x):
        if not is_stacked(x):
            raise UserError(f"trainable={pattern} requires a stack of layers, not {name}; remove the range of layers")
        return None
    size = total if stack is not None else x.shape[0] if x.ndim else 0
    selected = range(size)[layers]
    if not selected:
        raise UserError(f"trainable={pattern} selects no layer of {name}, which has {size} layers")
    return tuple(i for i, layer in enumerate(range(size) if stack is None else stack) if layer in selected)


def _runs(layers: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(first layer, number of layers, their offset in `layers`) of each run of consecutive layers.

    >>> list(_runs((0, 4, 5)))
    [(0, 1, 0), (4, 2, 1)]
    """
    begin = 0
    for n in range(1, len(layers) + 1):
        if n == len(layers) or layers[n] != layers[n - 1] + 1:
            yield layers[begin], n - begin, begin
            begin = n


def _take_layers(x: Tree, layers: tuple[int, ...]) -> Tree:
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((len(layers), *x.shape[1:]), x.dtype, sharding=x.sharding)
    parts = [x[first : first + count] for first, count, _ in _runs(layers)]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def _put_layers(x: jax.Array, new: jax.Array, layers: tuple[int, ...]) -> jax.Array:
    for first, count, start in _runs(layers):
        x = jax.lax.dynamic_update_slice_in_dim(x, new[start : start + count], first, 0)
    return x


def _named(tree: Tree) -> list[tuple[KeyPath, str, Any]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_weight)
    return [(path, path_name(path), x) for path, x in leaves]


def _is_weight(x: Tree) -> bool:
    return is_encoded(x) or is_axes(x)
