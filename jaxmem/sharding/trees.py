"""Parts of trees of parameters, of their axes, their gradients and optimizer state.

Parameters are nested dicts; the path of a part is the tuple of its names, ("blocks", "norm", "scale"). `select` and
`merge` compare the paths of leaves as jax does, so they also have trees of other containers, like the states of optax.
"""

import operator
from collections.abc import Callable, Collection, Mapping
from functools import reduce
from typing import Any

import jax
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxmem.sharding.table import is_axes
from jaxmem.sharding.weights import is_encoded
from jaxmem.typing import Tree

Path = tuple[str, ...]


def subtree(tree: Tree, path: Path) -> Tree:
    """The part at a path."""
    return reduce(operator.getitem, path, tree)


def nest(path: Path, part: Tree) -> Tree:
    """Nested dicts with only this part, at its path."""
    return unflatten_dict({path: part})


def single_weights(tree: Tree) -> list[Tree]:
    """For each leaf of nested dicts that is not None, nested dicts with only this leaf."""
    return [nest(path, leaf) for path, leaf in flatten_dict(tree).items() if leaf is not None]


def without(tree: Tree, paths: Collection[Path]) -> Tree:
    """Nested dicts without what is at or below these paths.

    >>> without({"a": {"b": 1, "c": 2}, "d": {"e": 3}}, [("a", "b"), ("d",)])
    {'a': {'c': 2}}
    """
    leaves = flatten_dict(tree).items()
    return unflatten_dict({path: x for path, x in leaves if not any(path[: len(p)] == p for p in paths)})


def replace_at(tree: Tree, new: Mapping[Path, Any]) -> Tree:
    """Nested dicts with these parts in place of those at the same paths, or in addition."""
    return unflatten_dict({**flatten_dict(tree), **new})


def select(tree: Tree, like: Tree, is_leaf: Callable[[Any], bool] | None = None) -> Tree:
    """The leaves of `tree` at the paths of the leaves of `like`. Leaves of `tree` may be tuples of axes."""
    leaves = jax.tree_util.tree_leaves_with_path
    by_path = dict(leaves(tree, is_leaf=is_axes) + leaves(tree, is_leaf=lambda x: is_axes(x) or is_encoded(x)))
    return jax.tree_util.tree_map_with_path(lambda path, _: by_path[path], like, is_leaf=is_leaf)


def merge(tree: Tree, *parts: Tree) -> Tree:
    """`tree`, with some leaves replaced by the leaves of the parts at the same paths."""
    by_path = {path: leaf for part in parts for path, leaf in jax.tree_util.tree_leaves_with_path(part)}
    return jax.tree_util.tree_map_with_path(by_path.get, tree)


def fill(tree: Tree, others: Tree) -> Tree:
    """The tree with each None replaced by the leaf of another tree at the same path."""
    return jax.tree.map(lambda x, other: other if x is None else x, tree, others, is_leaf=lambda x: x is None)
