"""Whether each value of an update depends only on the gradient and the weight at the same place.

Then the layers of a stack, and slices of a matrix, can be updated separately with the same result. Clipping by the
global norm and trust ratios (LARS, LAMB) need sums over several values: of one layer they are others than of all.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxmem.typing import Tree

MAX_SIZE = 128  # of a dimension: Adafactor has one second moment per row and column if both have this size


def is_elementwise(tx: optax.GradientTransformation, params: Tree) -> bool:
    """Whether updates of such parameters (arrays or their shapes) are computed element by element: a random half of the
    gradients and weights is replaced, and the updates of the other half must not change. If the updates are multiplied
    by zero (the first ones of a warmup, of `optax.MultiSteps`), only NaN changes them."""
    leaves, structure = jax.tree.flatten(params)
    random = np.random.default_rng(0)
    shapes = [(*(min(n, 2) for n in x.shape[:-2]), *(min(n, MAX_SIZE) for n in x.shape[-2:])) for x in leaves]
    values = [random.normal(size=shape).astype(x.dtype) for shape, x in zip(shapes, leaves, strict=True)]
    is_fixed = [random.random(shape) < 0.5 for shape in shapes]

    @jax.jit
    def fixed_updates(replacement: jax.Array) -> list[jax.Array]:
        replaced = [jnp.where(fixed, x, replacement.astype(x.dtype)) for fixed, x in zip(is_fixed, values, strict=True)]
        arrays = jax.tree.unflatten(structure, replaced)
        first, state = tx.update(arrays, tx.init(arrays), arrays)
        second, _ = tx.update(arrays, state, arrays)
        updates = jax.tree.leaves((first, second))
        return [jnp.where(fixed, u, 0) for fixed, u in zip(is_fixed * 2, updates, strict=True)]

    with jax.ensure_compile_time_eval():
        expected, *changed = (fixed_updates(jnp.float32(x)) for x in (1.0, 1e15, jnp.inf, jnp.nan))
        return all(np.array_equal(a, b) for updates in changed for a, b in zip(expected, updates, strict=True))
