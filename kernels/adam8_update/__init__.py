"""Optimizer steps on numbers in 8 bits, in one pass over memory. `reference.py` says what they compute.

A new implementation is a module with `adam8` and `int8_add` as in `reference.py`, and a line in IMPLEMENTATIONS.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.typing import ArrayLike

from jaxmem.kernels import choice
from jaxmem.kernels.given import Given, shown

from . import pallas, reference
from .arguments import Adam, Blocks, Moments8, checked, count

IMPLEMENTATIONS: dict[str, Any] = {"pallas": pallas, "reference": reference}


def adam8_update(
    g: ArrayLike,
    state: Moments8,
    unbiased: ArrayLike,
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
    given = Given("adam8_update")
    given.require(isinstance(state, Moments8), f"state is {shown(state)}; it should be Moments8")
    numbers = {"m": (state.m, "uint8"), "v": (state.v, "uint8")}
    constants = {"m_scale": (state.m_scale, "float32"), "v_scale": (state.v_scale, "float32")}
    g, found, blocks = checked(given, "g", g, numbers, constants, axis, block_size)
    state, unbiased = Moments8(**found), given.array("unbiased", unbiased, None, ("float32",))
    given.require(unbiased.shape == (2,), f"unbiased has shape {unbiased.shape}; it should be (2,)")
    adam = Adam(*(given.number(name, x) for name, x in (("beta1", beta1), ("beta2", beta2), ("epsilon", epsilon))))
    for name, beta in (("beta1", adam.beta1), ("beta2", adam.beta2)):
        given.require(0.0 <= beta < 1.0, f"{name} is {beta}; it should be in [0, 1)")
    given.require(adam.epsilon >= 0.0, f"epsilon is {adam.epsilon}; it should not be negative")
    run = lambda way: way.adam8(adam, blocks, g, state, unbiased)  # noqa: E731
    return _by("adam8_update", implementation, run, g, (g, state, unbiased), blocks)


def int8_add(
    codes: ArrayLike,
    scale: ArrayLike,
    update: ArrayLike,
    seeds: ArrayLike,
    *,
    axis: int = -2,
    block_size: int = 256,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Weights in int8, value = code / 127 * scale, plus an update: decoded, added, scaled anew and rounded
    stochastically, so that an update far below a step moves the weight by the right amount in the mean. In place.

    `seeds`: a word for each block. Which number is drawn depends on it and an element's place in the block, so that who
    gives a block the same word in whatever part of an array it lies draws the same."""
    numbers, constants = {"codes": (codes, "int8")}, {"scale": (scale, "float32"), "seeds": (seeds, "uint32")}
    update, found, blocks = checked(Given("int8_add"), "update", update, numbers, constants, axis, block_size)
    arrays = found["codes"], found["scale"], update, found["seeds"]
    return _by("int8_add", implementation, lambda way: way.int8_add(blocks, *arrays), update, arrays, blocks)


def _by(
    operation: str, given: Any, run: Callable[[Any], Any], like: jax.Array, arrays: tuple[Any, ...], blocks: Blocks
) -> Any:
    return choice.run(
        operation,
        given,
        IMPLEMENTATIONS,
        run,
        arrays,
        portable="reference",
        kind=f"{like.dtype.name} along {blocks.along}",
        sizes=(count(like), blocks.size),
    )


__all__ = ["IMPLEMENTATIONS", "Blocks", "Moments8", "adam8_update", "int8_add"]
