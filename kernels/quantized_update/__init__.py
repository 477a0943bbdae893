"""Fused optimizer steps on 8-bit state and weights. `reference.py` defines the results.

A new implementation is a module with `adam8` and `int8_add` as in `reference.py`, and a line in IMPLEMENTATIONS.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax.typing import ArrayLike
from jaxtyping import Array, Float, UInt8

from jaxmem.kernels.validation import FLOATS, Validator, describe

IMPLEMENTATIONS: dict[str, Any] = {name: f"{__name__}.{name}" for name in ("reference", "triton")}

NamedArrays = dict[str, tuple[Any, str]]  # name -> (array, the dtype that it should have)


class Moments8(NamedTuple):
    """Adam's two moments in 8-bit dynamic codes, the second unsigned, with a scale per block."""

    m: UInt8[Array, "*shape"]
    v: UInt8[Array, "*shape"]
    m_scale: Float[Array, "*blocks"]
    v_scale: Float[Array, "*blocks"]


@dataclass(frozen=True)
class AdamHyperparameters:
    """The decay rates of both moments, and the term that is added to the root of the second."""

    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8


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
    arrays = {}
    for named_arrays, shape, text in (
        (numbers, like.shape, f"it should be {name}'s, {like.shape}"),
        (scales, tuple(lines), f"with blocks of {blocks.size} it should be {tuple(lines)}"),
    ):
        for array_name, (x, dtype) in named_arrays.items():
            arrays[array_name] = checks.array(array_name, x, None, (dtype,))
            checks.require(x.shape == shape, f"{array_name} has shape {x.shape}; {text}")
    return like, arrays, blocks


def blocked(x: jax.Array, blocks: ScaleBlocks) -> jax.Array:
    """x as [blocks, size] or, with blocks along the rows, [rows of blocks, size, columns]; no bytes are moved."""
    if blocks.along == -1:
        return x.reshape(-1, blocks.size)
    return x.reshape(-1, blocks.size, x.shape[-1])


def lines(x: jax.Array, blocks: ScaleBlocks) -> jax.Array:
    """Scales in the shape that `blocked` gives to their elements, without the dimension of a block."""
    return x.reshape(-1) if blocks.along == -1 else x.reshape(-1, x.shape[-1])


def adam8_update(
    g: ArrayLike,
    state: Moments8,
    unbiased: ArrayLike,
    *,
    adam: AdamHyperparameters = AdamHyperparameters(),
    axis: int = -1,
    block_size: int = 256,
    implementation: str | None = None,
) -> tuple[jax.Array, Moments8]:
    """Adam's direction with moments in 8 bits. A second moment never becomes zero: it is at least the smallest nonzero
    value of a code.

    Args:
        g: The gradient, [..., rows, columns].
        state: 8-bit dynamic codes (Dettmers et al., arXiv:2110.02861) in blocks along `axis`.
        unbiased: 1 - beta1^t and 1 - beta2^t, [2], by which the moments are divided.
        adam: Hyperparameters.
        axis: -1 or -2.
        block_size: Values per scale.
        implementation: A name in IMPLEMENTATIONS.

    Returns:
        The direction, in the dtype of g, and the new state, which replaces the old state in place if it is donated.
    """
    checks = Validator("adam8_update")
    checks.require(isinstance(state, Moments8), f"state is {describe(state)}; it should be Moments8")
    numbers = {"m": (state.m, "uint8"), "v": (state.v, "uint8")}
    scales = {"m_scale": (state.m_scale, "float32"), "v_scale": (state.v_scale, "float32")}
    g, arrays, blocks = check_arguments(checks, "g", g, numbers, scales, axis, block_size)
    state = Moments8(**arrays)
    unbiased = checks.array("unbiased", unbiased, None, ("float32",))
    checks.require(unbiased.shape == (2,), f"unbiased has shape {unbiased.shape}; it should be (2,)")
    is_adam = isinstance(adam, AdamHyperparameters)
    checks.require(is_adam, f"adam is {describe(adam)}; it should be AdamHyperparameters")
    adam = AdamHyperparameters(*(checks.number(name, x) for name, x in vars(adam).items()))
    for name, beta in (("beta1", adam.beta1), ("beta2", adam.beta2)):
        checks.require(0.0 <= beta < 1.0, f"{name} is {beta}; it should be in [0, 1)")
    checks.require(adam.epsilon >= 0.0, f"epsilon is {adam.epsilon}; it should not be negative")
    module = _implementation(checks, implementation, (g, state, unbiased))
    return module.adam8(adam, blocks, g, state, unbiased)


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
    """Adds an update to int8 weights, value = code / 127 * scale, and quantizes the sum with stochastic rounding, so
    that updates far below a quantization step are correct on average.

    Args:
        codes: [..., rows, columns], int8.
        scale: A float32 for each `block_size` values along `axis`.
        update: Added to the values; the shape of `codes`.
        seeds: A random word per block. The number drawn for an element depends on this word and on the position in the
            block, so blocks with the same word draw the same numbers in any part of an array.
        axis: -1 or -2.
        block_size: Values per scale.
        implementation: A name in IMPLEMENTATIONS.

    Returns:
        The new codes and scales, in the same memory if the arrays are donated.
    """
    numbers = {"codes": (codes, "int8")}
    scales = {"scale": (scale, "float32"), "seeds": (seeds, "uint32")}
    checks = Validator("int8_add")
    update, checked, blocks = check_arguments(checks, "update", update, numbers, scales, axis, block_size)
    arrays = checked["codes"], checked["scale"], update, checked["seeds"]
    return _implementation(checks, implementation, arrays).int8_add(blocks, *arrays)


def _implementation(checks: Validator, name: str | None, arrays: tuple[Any, ...]) -> Any:
    return checks.implementation("reference" if name is None else name, IMPLEMENTATIONS, arrays)


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
