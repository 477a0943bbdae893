"""Some weights learn, the others stay as they are: freezing, as a transformation around any other.

Weights are named by their paths, `blocks.attention.q.weight`, and chosen by patterns as of files: `*.bias` (BitFit,
Zaken et al., arXiv:2106.10199), `head.*`, `*norm*`; `blocks[-2:].*` are the last two layers of a stack (`choice.py`).
What is frozen has no state: with Adam 8 bytes a weight less. Nor has it a gradient, where nothing else asks for one:
jax does not compute what nobody reads.

    tx = optim.trainable(optax.adam(1e-3), ["head.*"])
    state = tx.init(params)
    updates, state = tx.update(grads, state, params)     # of frozen weights: zeros
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxmem.optim.selection import Choice


def trainable(tx: optax.GradientTransformation, patterns: Sequence[str]) -> optax.GradientTransformationExtraArgs:
    """`tx` for the weights whose names match, for others nothing.

    An optimizer that was given the `axes` of stacked weights wants those of the trainable ones: `only(axes, patterns)`.
    """
    inner = optax.with_extra_args_support(tx)

    def init(params: Any) -> Any:
        return inner.init(only(params, patterns))

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        choice = Choice.of(grads, patterns)
        own = None if params is None else choice(params)
        updates, state = inner.update(choice(grads), state, own, **extra)
        return choice.put(jax.tree.map(jnp.zeros_like, grads), updates), state

    return optax.GradientTransformationExtraArgs(init, update)


def faster(
    tx: optax.GradientTransformation, by: float, patterns: Sequence[str]
) -> optax.GradientTransformationExtraArgs:
    """`tx` with the updates of weights whose names match multiplied: a learning rate of their own, as LoRA+ has for B
    (Hayou et al., arXiv:2402.12354)."""
    inner = optax.with_extra_args_support(tx)

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        updates, state = inner.update(grads, state, params, **extra)

        def scaled(path: Any, u: jax.Array) -> jax.Array:
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            return u * by if any(fnmatchcase(name, pattern) for pattern in patterns) else u

        return jax.tree_util.tree_map_with_path(scaled, updates), state

    return optax.GradientTransformationExtraArgs(inner.init, update)


def only(tree: Any, patterns: Sequence[str]) -> Any:
    """A tree of weights, or of their axes, with None in the place of those whose names match no pattern.

    >>> only({"a": {"bias": 1, "weight": 2}, "b": {"bias": 3}}, ["*.bias"])
    {'a': {'bias': 1, 'weight': None}, 'b': {'bias': 3}}
    """
    return Choice.of(tree, patterns)(tree)
