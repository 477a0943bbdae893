"""Weights in few bits to compute with, and a float32 copy of them to update: mixed precision (arXiv:1710.03740).

An update of AdamW is often less than half of bfloat16's last bit and would be lost. With the copy a step holds, per
parameter, 2 bytes of weights, 2 of gradients, 4 of the copy and 8 of moments: the 16 bytes of ZeRO's arithmetic
(arXiv:1910.02054). The copy is a part of the optimizer's state and lies where that lies.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class Mastered(NamedTuple):
    master: Any  # the weights in float32
    inner: Any  # the optimizer's own state, which knows only the float32 weights


def with_master(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """`tx` on a float32 copy of weights that rest in less. The update given back leads to the copy, rounded.

    >>> import optax
    >>> params = {"w": jnp.ones(3, jnp.bfloat16)}
    >>> state = with_master(optax.sgd(1e-4)).init(params)
    >>> state.master["w"].dtype.name
    'float32'
    """
    tx = optax.with_extra_args_support(tx)

    def init(params: Any) -> Mastered:
        master = _in_float32(params)
        return Mastered(master, tx.init(master))

    def update(grads: Any, state: Mastered, params: Any = None, **extra: Any) -> tuple[Any, Mastered]:
        updates, inner = tx.update(_in_float32(grads), state.inner, state.master, **extra)
        master = jax.tree.map(lambda m, u: m + u.astype(jnp.float32), state.master, updates)
        # Exact where the two are within a factor of two of each other (Sterbenz), and so is the sum with the weights.
        change = jax.tree.map(lambda m, w: m - w.astype(jnp.float32), master, params)
        return change, Mastered(master, inner)

    return optax.GradientTransformationExtraArgs(init, update)


def _in_float32(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)
