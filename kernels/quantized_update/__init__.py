"""Fused optimizer steps on 8-bit state and weights. `reference.py` defines the results.

A new implementation is a module with `adam8` and `int8_add` as in `reference.py`, and a line in IMPLEMENTATIONS.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.typing import ArrayLike

from jaxmem.kernels.choice import Operation
from jaxmem.kernels.validation import Validator, describe

from .arguments import Adam, Moments8, ScaleBlocks, check_arguments

IMPLEMENTATIONS: dict[str, Any] = {name: f"{__name__}.{name}" for name in ("reference", "triton")}


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
    """Adam's direction for a gradient [..., rows, columns], in the gradient's dtype, and the new state, which replaces
    the old state in place if it is donated.

    `state`: 8-bit dynamic codes (Dettmers et al., arXiv:2110.02861) in blocks along `axis`, -1 or -2. A second moment
    never becomes zero: it is at least the smallest nonzero value of a code. `unbiased`: 1 - beta1^t and 1 - beta2^t,
    [2], by which the moments are divided.
    """
    checks = Validator("adam8_update")
    checks.require(isinstance(state, Moments8), f"state is {describe(state)}; it should be Moments8")
    numbers = {"m": (state.m, "uint8"), "v": (state.v, "uint8")}
    scales = {"m_scale": (state.m_scale, "float32"), "v_scale": (state.v_scale, "float32")}
    g, found, blocks = check_arguments(checks, "g", g, numbers, scales, axis, block_size)
    state, unbiased = Moments8(**found), checks.array("unbiased", unbiased, None, ("float32",))
    checks.require(unbiased.shape == (2,), f"unbiased has shape {unbiased.shape}; it should be (2,)")
    adam = Adam(*(checks.number(name, x) for name, x in (("beta1", beta1), ("beta2", beta2), ("epsilon", epsilon))))
    for name, beta in (("beta1", adam.beta1), ("beta2", adam.beta2)):
        checks.require(0.0 <= beta < 1.0, f"{name} is {beta}; it should be in [0, 1)")
    checks.require(adam.epsilon >= 0.0, f"epsilon is {adam.epsilon}; it should not be negative")
    run = lambda module: module.adam8(adam, blocks, g, state, unbiased)  # noqa: E731
    return _run("adam8_update", implementation, run, g, (g, state, unbiased), blocks)


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
    that updates far below a quantization step are correct on average. Donated arrays are updated in place.

    `seeds`: a random word per block. The number drawn for an element depends on this word and on the position in the
    block, so blocks with the same word draw the same numbers in any part of an array."""
    numbers, scales = {"codes": (codes, "int8")}, {"scale": (scale, "float32"), "seeds": (seeds, "uint32")}
    checks = Validator("int8_add")
    update, found, blocks = check_arguments(checks, "update", update, numbers, scales, axis, block_size)
    arrays = found["codes"], found["scale"], update, found["seeds"]
    return _run("int8_add", implementation, lambda module: module.int8_add(blocks, *arrays), update, arrays, blocks)


def _run(
    name: str,
    implementation: Any,
    call: Callable[[Any], Any],
    like: jax.Array,
    arrays: tuple[Any, ...],
    blocks: ScaleBlocks,
) -> Any:
    kind, sizes = f"{like.dtype.name} along {blocks.along}", (like.size, blocks.size)
    return Operation(name, IMPLEMENTATIONS, "reference").run(implementation, call, arrays, kind=kind, sizes=sizes)


__all__ = ["IMPLEMENTATIONS", "Moments8", "ScaleBlocks", "adam8_update", "int8_add"]
