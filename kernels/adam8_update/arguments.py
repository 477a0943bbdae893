"""What the updates take: checked once, in one place, whichever implementation runs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Float, UInt8

from jaxmem.kernels.given import FLOATS, Given

Named = dict[str, tuple[Any, str]]  # arrays by name, and what they should be in


class Moments8(NamedTuple):
    """Adam's two averages in dynamic codes of 8 bits, the second unsigned, with a constant for each block."""

    m: UInt8[Array, "*shape"]
    v: UInt8[Array, "*shape"]
    m_scale: Float[Array, "*blocks"]
    v_scale: Float[Array, "*blocks"]


@dataclass(frozen=True)
class Adam:
    beta1: float
    beta2: float
    epsilon: float


@dataclass(frozen=True)
class Blocks:
    """Which numbers share a constant."""

    along: int  # the dimension that blocks run along, counted from the end: -1 or -2
    size: int


def checked(
    given: Given, named: str, like: Any, numbers: Named, constants: Named, axis: Any, block_size: Any
) -> tuple[jax.Array, dict[str, jax.Array], Blocks]:
    """In one form, or a ValueError that names what is wrong with `like` (the gradient, the update), with what there is
    for each of its numbers or with what there is for each block, arrays beside the dtype that each should have."""
    like = given.array(named, like, "[..., rows, columns]", FLOATS)
    blocks = Blocks(given.whole("axis", axis), given.whole("block_size", block_size))
    given.require(blocks.along in (-1, -2), f"axis is {blocks.along}; it should be -1 or -2")
    given.require(blocks.size >= 1, f"block_size is {blocks.size}; it should be at least 1")
    size = like.shape[blocks.along]
    given.require(
        size % blocks.size == 0, f"blocks of {blocks.size} do not fill the {size} numbers along axis {blocks.along}"
    )
    lines = list(like.shape)
    lines[blocks.along] = size // blocks.size
    found = {}
    for name, (x, dtype) in numbers.items():
        found[name] = given.array(name, x, None, (dtype,))
        given.require(x.shape == like.shape, f"{name} has shape {x.shape}; it should be {named}'s, {like.shape}")
    for name, (x, dtype) in constants.items():
        found[name] = given.array(name, x, None, (dtype,))
        given.require(
            x.shape == tuple(lines), f"{name} has shape {x.shape}; blocks of {blocks.size} take {tuple(lines)}"
        )
    return like, found, blocks


def blocked(x: jax.Array, blocks: Blocks) -> jax.Array:
    """[blocks, size] or, along the rows, [rows of blocks, size, columns]: the same bytes in the same order."""
    if blocks.along == -1:
        return x.reshape(-1, blocks.size)
    return x.reshape(-1, blocks.size, x.shape[-1])


def lines(x: jax.Array, blocks: Blocks) -> jax.Array:
    """Constants as `blocked` has their numbers, without those."""
    return x.reshape(-1) if blocks.along == -1 else x.reshape(-1, x.shape[-1])


def count(x: jax.Array) -> int:
    return math.prod(x.shape)
