"""What the updates take: checked once, in one place, whichever implementation runs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
from jaxtyping import Array, Float, UInt8

DTYPES = ("float32", "bfloat16", "float16")
Named = dict[str, tuple[jax.Array, str]]  # arrays by name, and what they should be in


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


def checked(operation: str, like: jax.Array, numbers: Named, constants: Named, blocks: Blocks) -> None:
    """A ValueError names what is wrong with `like` (a gradient, an update), with what there is for each of its numbers
    or with what there is for each block, arrays beside the dtype that each should have."""

    def require(condition: bool, message: str) -> None:
        if not condition:
            raise ValueError(f"{operation}: {message}")

    require(like.ndim >= 2 and like.size > 0, f"an array of shape {like.shape}; it should be [..., rows, columns]")
    require(like.dtype.name in DTYPES, f"numbers in {like.dtype}; they should be in one of {', '.join(DTYPES)}")
    require(blocks.along in (-1, -2), f"axis is {blocks.along}; it should be -1 or -2")
    require(blocks.size >= 1, f"block_size is {blocks.size}; it should be at least 1")
    size = like.shape[blocks.along]
    require(
        size % blocks.size == 0, f"blocks of {blocks.size} do not fill the {size} numbers along axis {blocks.along}"
    )
    wanted = list(like.shape)
    wanted[blocks.along] = size // blocks.size
    for name, (x, _) in numbers.items():
        require(x.shape == like.shape, f"{name} has shape {x.shape}; it should be that of its numbers, {like.shape}")
    for name, (x, _) in constants.items():
        require(x.shape == tuple(wanted), f"{name} has shape {x.shape}; blocks of {blocks.size} take {tuple(wanted)}")
    for name, (x, dtype) in (numbers | constants).items():
        require(x.dtype.name == dtype, f"{name} is {x.dtype}; it should be {dtype}")


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
