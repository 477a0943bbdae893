"""The arguments of the updates, and their checks for all implementations."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Float, UInt8

from jaxmem.kernels.validation import FLOATS, Validator

NamedArrays = dict[str, tuple[Any, str]]  # name -> (array, the dtype that it should have)


class Moments8(NamedTuple):
    """Adam's two moments in 8-bit dynamic codes, the second unsigned, with a scale per block."""

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
class ScaleBlocks:
    """The blocks of elements that share a scale."""

    along: int  # the dimension that is divided into blocks: -1 or -2
    size: int


def check_arguments(
    checks: Validator, name: str, like: Any, numbers: NamedArrays, scales: NamedArrays, axis: Any, block_size: Any
) -> tuple[jax.Array, dict[str, jax.Array], ScaleBlocks]:
    """`like` (the gradient or the update), the arrays by name, and the blocks; ValueError names a wrong argument.
    `numbers` have the shape of `like`, `scales` one element per block."""
    like = checks.array(name, like, "[..., rows, columns]", FLOATS)
    blocks = ScaleBlocks(checks.whole_number("axis", axis), checks.whole_number("block_size", block_size))
    checks.require(blocks.along in (-1, -2), f"axis is {blocks.along}; it should be -1 or -2")
    checks.require(blocks.size >= 1, f"block_size is {blocks.size}; it should be at least 1")
    size = like.shape[blocks.along]
    checks.require(
        size % blocks.size == 0,
        f"block_size is {blocks.size}; the {size} values along axis {blocks.along} should be a multiple of it",
    )
    lines = list(like.shape)
    lines[blocks.along] = size // blocks.size
    found = {}
    for name_, (x, dtype) in numbers.items():
        found[name_] = checks.array(name_, x, None, (dtype,))
        checks.require(x.shape == like.shape, f"{name_} has shape {x.shape}; it should be {name}'s, {like.shape}")
    for name_, (x, dtype) in scales.items():
        found[name_] = checks.array(name_, x, None, (dtype,))
        message = f"{name_} has shape {x.shape}; with blocks of {blocks.size} it should be {tuple(lines)}"
        checks.require(x.shape == tuple(lines), message)
    return like, found, blocks


def blocked(x: jax.Array, blocks: ScaleBlocks) -> jax.Array:
    """x as [blocks, size] or, with blocks along the rows, [rows of blocks, size, columns]; no bytes are moved."""
    if blocks.along == -1:
        return x.reshape(-1, blocks.size)
    return x.reshape(-1, blocks.size, x.shape[-1])


def lines(x: jax.Array, blocks: ScaleBlocks) -> jax.Array:
    """Scales in the shape that `blocked` gives to their elements, without the dimension of a block."""
    return x.reshape(-1) if blocks.along == -1 else x.reshape(-1, x.shape[-1])


class UpdateShape(NamedTuple):
    dims: tuple[int, ...]
    along: int = -1
    block: int = 256

    @property
    def numbers(self) -> int:
        return math.prod(self.dims)

    @property
    def least_bytes(self) -> float:
        """Bytes of Adam with a 16-bit gradient if each array is read once and written once."""
        return self.numbers * (8 + 16 / self.block)


UPDATE_SHAPES = {
    "llama3-8b up": UpdateShape((4096, 14336)),
    "llama2-7b down": UpdateShape((11008, 4096), -2, 172),
    "llama3-8b all up": UpdateShape((32, 4096, 14336)),
}
