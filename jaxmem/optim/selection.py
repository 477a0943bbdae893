"""Which weights learn, by patterns of their names; of stacked ones which layers, too.

A pattern is one of files, as `*.bias` or `head.*`. Where it names a stack it may say which of its layers, as Python
counts them: `blocks[-2:].*` are the last two, `blocks[:4].mlp.*` the MLPs of the first four.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem.config.names import LAYERS
from jaxmem.errors import UserError, nearest
from jaxmem.sharding import is_axes
from jaxmem.sharding.weights import is_quantized

Path = tuple[Any, ...]


@dataclass(frozen=True)
class Choice:
    """Of each weight that learns, by its path, which layers of the stack that it is do; None: it learns whole."""

    layers: Mapping[Path, tuple[int, ...] | None]

    @classmethod
    def of(cls, tree: Any, patterns: Sequence[str]) -> Choice:
        """`tree`: weights, or their shapes; of their axes, which do not say how many layers there are, all learn."""
        named = _named(tree)
        found: dict[Path, tuple[int, ...] | None] = {}
        for pattern in patterns:
            parts = LAYERS.search(pattern)
            plain = LAYERS.sub("", pattern, count=1)
            own = [(path, name, x) for path, name, x in named if fnmatchcase(name, plain)]
            if not own:
                names = [name for _, name, _ in named]
                raise UserError(f"trainable: no weight is called {plain!r}{nearest(plain, names)}")
            for path, name, x in own:
                some = None if parts is None else _counted(x, name, parts)
                known = found.get(path, ())
                found[path] = None if some is None or known is None else tuple(sorted({*known, *some}))
        sizes = {path: x.shape[0] for path, _, x in named if found.get(path) is not None}
        return cls({path: None if some and len(some) == sizes[path] else some for path, some in found.items()})

    def __call__(self, tree: Any) -> Any:
        """A tree of weights, or of their axes, with None in the place of those that stay; of a stack of which some
        layers learn, these."""

        def chosen(path: Path, x: Any) -> Any:
            if path not in self.layers:
                return None
            some = self.layers[path]
            return x if some is None or is_axes(x) else jax.tree.map(lambda x: _of_layers(x, some), x)

        return jax.tree_util.tree_map_with_path(chosen, tree, is_leaf=_is_weight)

    def put(self, tree: Any, own: Any) -> Any:
        """`tree` with what was chosen out of one like it in its place."""
        new = {path: x for path, _, x in _named(own)}

        def one(path: Path, x: Any) -> Any:
            some = self.layers.get(path)
            if path not in new or some is None:
                return new.get(path, x)
            return jax.tree.map(lambda x, new: _written(x, new, some), x, new[path])

        return jax.tree_util.tree_map_with_path(one, tree, is_leaf=_is_weight)

    @property
    def some(self) -> dict[Path, tuple[int, ...]]:
        """The stacks of which not all layers learn."""
        return {path: some for path, some in self.layers.items() if some is not None}


def _counted(x: Any, name: str, parts: re.Match[str]) -> tuple[int, ...] | None:
    if is_axes(x):
        if x[:1] != ("layer",):
            raise UserError(f"trainable: {name} is no stack, of which {parts[0]} would be layers; leave that out")
        return None
    start, stop = (int(part) if part not in ("", "-") else None for part in parts.groups())
    size = x.shape[0] if x.ndim else 0
    found = tuple(range(size)[start:stop])
    if not found:
        raise UserError(f"trainable: {parts[0]} names no layer of {name}, which has {size}")
    return found


def _runs(layers: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(first, how many, where they begin among these) of layers that follow each other.

    >>> list(_runs((0, 4, 5)))
    [(0, 1, 0), (4, 2, 1)]
    """
    begin = 0
    for n in range(1, len(layers) + 1):
        if n == len(layers) or layers[n] != layers[n - 1] + 1:
            yield layers[begin], n - begin, begin
            begin = n


def _of_layers(x: Any, layers: tuple[int, ...]) -> Any:
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((len(layers), *x.shape[1:]), x.dtype, sharding=x.sharding)
    parts = [x[first : first + count] for first, count, _ in _runs(layers)]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def _written(x: jax.Array, new: jax.Array, layers: tuple[int, ...]) -> jax.Array:
    for first, count, at in _runs(layers):
        x = jax.lax.dynamic_update_slice_in_dim(x, new[at : at + count], first, 0)
    return x


def _named(tree: Any) -> list[tuple[Path, str, Any]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_weight)
    return [(path, jax.tree_util.keystr(path, simple=True, separator="."), x) for path, x in leaves]


def _is_weight(x: Any) -> bool:
    return is_quantized(x) or is_axes(x)
