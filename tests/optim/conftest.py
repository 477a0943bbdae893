"""Small weights, gradients, and a loop to run an optimizer in."""

import jax
import jax.numpy as jnp
import numpy as np


def normal(*shape, seed=0, scale=1.0):
    return jnp.asarray(scale * np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def gradients(params, count, seed=1):
    """Of each update a tree like the parameters', every leaf of its own size."""
    draw = np.random.default_rng(seed)
    return [
        jax.tree.map(lambda w: jnp.asarray(draw.standard_normal(w.shape) * 0.1, jnp.float32), params)
        for _ in range(count)
    ]


def updates(tx, params, grads, **options):
    """What the optimizer says at each update, and its state after all, with weights that stand still."""
    state, said = jax.jit(tx.init)(params), []
    step = jax.jit(lambda g, s: tx.update(g, s, params, **options))
    for g in grads:
        one, state = step(g, state)
        said.append(one)
    return said, state


def same(one, two, rtol=1e-5, atol=1e-6):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), one, two)
