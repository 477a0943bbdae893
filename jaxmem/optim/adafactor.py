"""Adafactor: of the second moment of a matrix only its row and column sums (Shazeer and Stern, arXiv:1804.04235).

A matrix [m, n] has m + n numbers of state in place of 2mn, 4 (m + n) / (m n) bytes a parameter; a vector has one for
each weight. The update has the size of the weights' own root mean square, so a learning rate is a share of it:
1e-2 where Adam has 1e-3 or less.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxmem.leaves import Derived
from jaxmem.optim.by_layer import At, Leaf, by_layer
from jaxmem.weights import is_quantized

SQUARE = 1e-30  # added to each squared gradient
LEAST_SIZE = 1e-3  # of weights, where they begin at zero
LARGEST = 1.0  # root mean square of an update before it is scaled


@dataclass(frozen=True)
class Factored:
    decay: float = 0.8  # the average at update t forgets with 1 - t^-decay

    def init(self, leaf: Leaf) -> dict[str, Derived]:
        if len(leaf.shape) == 2:
            return {"row": leaf.zeros((0,)), "column": leaf.zeros((1,))}
        return {"v": leaf.zeros()}

    def update(self, g: jax.Array, state: dict[str, Any], at: At, /) -> tuple[jax.Array, dict[str, Any]]:
        g = g.astype(jnp.float32)
        squares = g * g + SQUARE
        beta = 1 - at.count.astype(jnp.float32) ** -self.decay
        means = (
            {"row": jnp.mean(squares, axis=1), "column": jnp.mean(squares, axis=0)}
            if "row" in state
            else {"v": squares}
        )
        new = jax.tree.map(lambda old, now: beta * old + (1 - beta) * now, state, means)
        if "row" in new:
            # The product's mean over the rows is the columns' mean, which is counted once too often.
            row = jax.lax.rsqrt(new["row"] / jnp.mean(new["row"]))
            u = g * row[:, None] * jax.lax.rsqrt(new["column"])[None, :]
        else:
            u = g * jax.lax.rsqrt(new["v"])
        size = jnp.maximum(_root_mean_square(at.weight), LEAST_SIZE)
        return u * (size / jnp.maximum(1.0, _root_mean_square(u) / LARGEST)), new


def scale_by_adafactor(decay: float = 0.8, *, axes: Any = None) -> optax.GradientTransformationExtraArgs:
    """The paper's algorithm 4 with relative step sizes: factored second moment, clipped, scaled by the weights.

    >>> tx = scale_by_adafactor()
    >>> tx.init({"w": jnp.zeros((64, 32))}).leaves["w"]["row"].value.shape
    (64,)
    """
    return by_layer(lambda _: Factored(decay), axes)


def _root_mean_square(x: Any) -> jax.Array:
    values = x.dequantize(jnp.float32) if is_quantized(x) else x.astype(jnp.float32)
    return jnp.sqrt(jnp.mean(jnp.square(values)))
