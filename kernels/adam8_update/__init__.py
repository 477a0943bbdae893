"""Optimizer steps on numbers in 8 bits, in one pass over memory. `reference.py` says what they compute.

A new implementation is a module with `adam8` and `int8_add` as in `reference.py`, and a line in IMPLEMENTATIONS.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem.kernels.choice import Choice, choose

from . import pallas, reference
from .arguments import Adam, Blocks, Moments8, checked, count

IMPLEMENTATIONS: dict[str, Any] = {"pallas": pallas, "reference": reference}


def adam8_update(
    g: jax.Array,
    state: Moments8,
    unbiased: jax.Array,
    *,
    beta1: float = 0.9,
    beta2: float = 0.95,
    epsilon: float = 1e-8,
    axis: int = -1,
    block_size: int = 256,
    implementation: str | None = None,
) -> tuple[jax.Array, Moments8]:
    """Adam's direction for a gradient [..., rows, columns], in its dtype, and the new state, in place of the old.

    `state`: dynamic codes of 8 bits (Dettmers et al., arXiv:2110.02861) in blocks along `axis`, -1 or -2. A second
    moment never becomes zero: it is the least that a code holds. `unbiased`: 1 - beta1^t and 1 - beta2^t, [2], by
    which the averages are divided.
    """
    blocks = Blocks(axis, block_size)
    _moments(state, g, blocks)
    if unbiased.shape != (2,) or unbiased.dtype != jnp.float32:
        raise ValueError(f"adam8_update: unbiased is {unbiased.dtype}{unbiased.shape}; it should be two in float32")
    run = IMPLEMENTATIONS[picked("adam8_update", g, blocks, implementation).implementation]
    return run.adam8(Adam(beta1, beta2, epsilon), blocks, g, state, unbiased)


def int8_add(
    codes: jax.Array,
    scale: jax.Array,
    update: jax.Array,
    seeds: jax.Array,
    *,
    axis: int = -2,
    block_size: int = 256,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Weights in int8, value = code / 127 * scale, plus an update: decoded, added, scaled anew and rounded
    stochastically, so that an update far below a step moves the weight by the right amount in the mean. In place.

    `seeds`: a word for each block. Which number is drawn depends on it and an element's place in the block, so that who
    gives a block the same word in whatever part of an array it lies draws the same."""
    blocks = Blocks(axis, block_size)
    numbers, constants = {"codes": (codes, "int8")}, {"scale": (scale, "float32"), "seeds": (seeds, "uint32")}
    checked("int8_add", update, numbers, constants, blocks)
    run = IMPLEMENTATIONS[picked("int8_add", update, blocks, implementation).implementation]
    return run.int8_add(blocks, codes, scale, update, seeds)


def picked(operation: str, like: jax.Array, blocks: Blocks, implementation: str | None = None) -> Choice:
    """Which implementation runs it, and why."""
    names: Iterable[str] = IMPLEMENTATIONS
    kind = f"{like.dtype.name} along {blocks.along}"
    return choose(operation, implementation, names, portable="reference", kind=kind, sizes=(count(like), blocks.size))


def _moments(state: Moments8, g: jax.Array, blocks: Blocks) -> None:
    numbers = {"m": (state.m, "uint8"), "v": (state.v, "uint8")}
    constants = {"m_scale": (state.m_scale, "float32"), "v_scale": (state.v_scale, "float32")}
    checked("adam8_update", g, numbers, constants, blocks)


__all__ = ["IMPLEMENTATIONS", "Blocks", "Moments8", "adam8_update", "int8_add", "picked"]
