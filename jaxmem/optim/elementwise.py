"""Whether each value of an update depends only on the gradient and the weight at the same place.

Then the layers of a stack, and slices of a matrix, can be updated separately with the same result. Clipping by the
global norm and trust ratios (LARS, LAMB) need sums over several values: of one layer they are others than of all. Masks
and labels that depend on the number of dimensions choose other weights, because a stack has one more than a layer.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxmem.sharding.table import is_axes, is_stacked
from jaxmem.sharding.trees import single_weights
from jaxmem.typing import AxesTree, Tree

MAX_SIZE = 128  # of a dimension: Adafactor has one second moment per row and column if both have this size


def is_elementwise(tx: optax.GradientTransformation, params: Tree) -> bool:
    """Whether updates of such parameters (arrays or their shapes) are computed element by element: a random half of the
    gradients and weights is replaced, and the updates of the other half must not change. If the updates are multiplied
    by zero (the first ones of a warmup, of `optax.MultiSteps`), only NaN changes them."""
    arrays = _random_values(params)
    if not _accepts(tx, arrays):
        return False
    values, structure = jax.tree.flatten(arrays)
    random = np.random.default_rng(1)
    is_fixed = [random.random(x.shape) < 0.5 for x in values]

    @jax.jit
    def fixed_updates(replacement: jax.Array) -> list[jax.Array]:
        replaced = [jnp.where(fixed, x, replacement.astype(x.dtype)) for fixed, x in zip(is_fixed, values, strict=True)]
        arrays = jax.tree.unflatten(structure, replaced)
        updates = jax.tree.leaves(_two_updates(tx, arrays, arrays))
        return [jnp.where(fixed, u, 0) for fixed, u in zip(is_fixed * 2, updates, strict=True)]

    with jax.ensure_compile_time_eval():
        expected, *changed = (fixed_updates(jnp.float32(x)) for x in (1.0, 1e15, jnp.inf, jnp.nan))
        return all(np.array_equal(a, b) for updates in changed for a, b in zip(expected, updates, strict=True))


def updates_single_weights(tx: optax.GradientTransformation, params: Tree) -> bool:
    """Whether each of these parameters can be updated without the others: not if a mask or labels are a tree, which has
    the structure of all parameters."""
    return all(_accepts(tx, weight) for weight in single_weights(params))


def updates_stacks_as_layers(tx: optax.GradientTransformation, params: Tree, axes: AxesTree) -> bool:
    """Whether an elementwise optimizer updates stacks of one layer, and this layer without the dimension `layer`, in
    the same way. True if it cannot update the layer, because it has a tree of masks or arrays for the stacks."""

    def map_stacks(function: Callable[[Any], Any], tree: Tree) -> Tree:
        return jax.tree.map(lambda names, x: function(x) if is_stacked(names) else x, axes, tree, is_leaf=is_axes)

    layers = map_stacks(lambda x: x[0], _random_values(params))
    if not _accepts(tx, layers):
        return True

    @jax.jit
    def both_updates(size: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
        weights = jax.tree.map(lambda g: g * size.astype(g.dtype), layers)
        stacks = (map_stacks(lambda x: x[None], tree) for tree in (layers, weights))
        in_stacks = [map_stacks(lambda x: x[0], updates) for updates in _two_updates(tx, *stacks)]
        return jax.tree.leaves(in_stacks), jax.tree.leaves(_two_updates(tx, layers, weights))

    def is_near(a: jax.Array, b: jax.Array) -> bool:
        wide = np.float32(a)
        if np.array_equal(a, b):  # also infinities
            return True
        return bool(np.max(np.abs(wide - np.float32(b)), initial=0.0) <= 0.01 * np.max(np.abs(wide), initial=0.0))

    with jax.ensure_compile_time_eval():
        pairs = [both_updates(jnp.float32(size)) for size in (1.0, 1e4)]  # large weights show a small decay
        return all(is_near(a, b) for in_stacks, alone in pairs for a, b in zip(in_stacks, alone, strict=True))


def _accepts(tx: optax.GradientTransformation, params: Tree) -> bool:
    """Whether an optimizer can update such parameters."""
    try:
        jax.eval_shape(lambda arrays: _two_updates(tx, arrays, arrays), params)
    except (KeyError, TypeError, ValueError):
        return False
    return True


def _two_updates(tx: optax.GradientTransformation, grads: Tree, params: Tree) -> tuple[Tree, Tree]:
    """The first update may be multiplied by zero, at the begin of a warmup."""
    first, state = tx.update(grads, tx.init(params), params)
    return first, tx.update(grads, state, params)[0]


def _random_values(params: Tree) -> Tree:
    """Arrays like these parameters, with fewer layers, and smaller matrices if they are large."""
    random = np.random.default_rng(0)

    def draw(x: jax.Array) -> np.ndarray:
        shape = (*(min(n, 2) for n in x.shape[:-2]), *(min(n, MAX_SIZE) for n in x.shape[-2:]))
        return random.normal(size=shape).astype(x.dtype)

    return jax.tree.map(draw, params)
