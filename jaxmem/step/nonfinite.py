"""Finds the first gradient that is not finite: the name of its weight, and its layer.

The sums of squares for the gradient norm are returned per weight and layer, a few hundred numbers. Non-finite values
propagate from a layer to the layers before it, so the first one is the one that the backward pass computes first. The
order is: weights after the layers, then layers from the last to the first, then other weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import KeyPath

from jaxmem.config.names import count_layers, is_last_stack, split_stack
from jaxmem.sharding.table import Axes, is_axes, is_stacked, path_name
from jaxmem.typing import AxesTree, Tree

METRIC = "nonfinite"  # name of a metric: the index among the names of gradients of the first non-finite one, or -1
AFTER_LAYERS = ("head", "norm")  # modules of networks between the layers and the loss


@dataclass(frozen=True)
class BackwardOrder:
    """The order in which the backward pass computes the gradients of weights, one per layer for stacks."""

    axes: AxesTree  # of the trainable weights
    layer_order: list[int] | None = None  # the layer that is stored at each position of a stack; None: in order
    # By path, the layers of a stack that have a gradient, if not all have one.
    partial_stacks: Mapping[KeyPath, tuple[int, ...]] = field(default_factory=dict)

    def names(self, sizes: Tree) -> list[str]:
        """The name of each gradient. `sizes`: the weights, or their shapes."""
        leaves = jax.tree_util.tree_leaves_with_path(sizes)
        lengths = {path: leaf.shape[0] for path, leaf in leaves if leaf.ndim}
        names = []
        for path, _, layer in self._entries(lengths):
            name = split_stack(path_name(path))[0]
            names.append(name if layer is None else f"{name} of layer {layer}")
        return names

    def squared_norms(self, grads: Tree) -> jax.Array:
        """The sum of squares of each gradient."""
        return self.sort(sums_of_squares(grads, self.axes))

    def sort(self, sums: Tree) -> jax.Array:
        """`sums_of_squares` in this order."""
        by_path = dict(jax.tree_util.tree_leaves_with_path(sums))
        sizes = {path: x.size for path, x in by_path.items()}
        starts = dict(zip(by_path, np.cumsum([0, *sizes.values()]), strict=False))
        positions = [starts[path] + index for path, index, _ in self._entries(sizes)]
        return jnp.concatenate([x.reshape(-1) for x in by_path.values()])[np.asarray(positions)]

    def _entries(self, lengths: dict[KeyPath, int]) -> list[tuple[KeyPath, int, int | None]]:
        """(path, index among the gradients of this weight, layer or None)."""
        entries: list[tuple[tuple[int, ...], KeyPath, int, int | None]] = []
        stacks: dict[KeyPath, int] = {}
        count = count_layers(map(path_name, lengths))
        for number, (path, names) in enumerate(jax.tree_util.tree_leaves_with_path(self.axes, is_leaf=is_axes)):
            if not is_stacked(names):
                entries.append(((0 if path[0].key in AFTER_LAYERS else 2, number), path, 0, None))
                continue
            # Lists of a script's model may have other names; those within one module count as one stack.
            depth = next((n for n, step in enumerate(path) if step.key.startswith("blocks")), 1)
            stack = stacks.setdefault(path[:depth], len(stacks))
            name = path_name(path)
            order = self.layer_order if is_last_stack(name, count) else None
            for index, position in enumerate(self.partial_stacks.get(path, range(lengths[path]))):
                layer = _number(split_stack(name)[1], position if order is None else order[position])
                entries.append(((1, -stack, -layer, number), path, index, layer))
        return [entry for _, *entry in sorted(entries, key=lambda entry: entry[0])]  # type: ignore[misc]


def sums_of_squares(grads: Tree, axes: AxesTree) -> Tree:
    """The sum of squares of the gradient of each weight (of each layer for stacks), in float32."""

    def sum_of_squares(names: Axes, g: jax.Array) -> jax.Array:
        return jnp.sum(jnp.square(g.astype(jnp.float32)), axis=range(int(is_stacked(names)), g.ndim))

    return jax.tree.map(sum_of_squares, axes, grads, is_leaf=is_axes)


def first(squares: jax.Array) -> jax.Array:
    """The index of the first value that is not finite, or -1."""
    bad = ~jnp.isfinite(squares)
    return jnp.where(jnp.any(bad), jnp.argmax(bad), -1).astype(jnp.int32)


def _number(stack: range | None, position: int) -> int:
    """The number of the layer at a position of a stack; after the last layer are identity layers."""
    return position if stack is None else stack.start + stack.step * position
