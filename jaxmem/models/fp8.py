"""Matrix multiplications in FP8: weights and activations in e4m3, gradients in e5m2 (Micikevicius et al.,
arXiv:2209.05433).

Each operand is divided by scales that bring its largest absolute values into the range of the format, and rounded.
`tensor`: one scale per operand. `row`: one per row of the left operand and one per column of the right operand, so an
outlier costs precision in its row only; results are multiplied by both. A scale is computed from the values that it
scales, so no history is stored. Scales are powers of two: they round nothing, and values that share a scale in one
layout of devices or chunks but not in another are rounded alike, unless they are below the range of the format.

XLA compiles a dot of values converted from float8 to an FP8 matmul of cuBLASLt, which sums in float32. CPUs multiply
the same rounded values in the compute dtype.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxmem.config.base import Scaling

SCOPE = "fp8_matmul"  # the scope of the dots, by which plans recognize them
MIN_CAPABILITY = 89  # the first GPUs with FP8 matmuls have compute capability 8.9
VALUES, GRADIENTS = jnp.float8_e4m3fn, jnp.float8_e5m2


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rounded:
    """Weights or activations rounded with one scale. It is a constant for jax, which would round derivatives to float8
    too."""

    codes: Any  # (*shape), uint8: the bits of values in e4m3
    scale: Any  # (), float32

    @property
    def ndim(self) -> int:
        return self.codes.ndim


def round_values(x: Float[Array, "*shape"]) -> Rounded:
    values, scale = _rounded(x, VALUES, None)
    return Rounded(jax.lax.bitcast_convert_type(values, jnp.uint8), scale)


def product(
    x: Float[Array, "*batch inputs"] | Rounded,
    w: Float[Array, "inputs outputs"] | Rounded,
    scaling: Scaling,
    dtype: DTypeLike,
) -> Float[Array, "*batch outputs"]:
    """x @ w in `dtype`. An operand that is rounded already requires the scaling `tensor`."""
    return _multiply((x, w), ((x.ndim - 1,), (0,)), (VALUES, VALUES), scaling, dtype)


def input_gradient(
    g: Float[Array, "*batch outputs"], w: Float[Array, "inputs outputs"] | Rounded, scaling: Scaling
) -> Float[Array, "*batch inputs"]:
    """g @ w.T, the gradient of x from that of x @ w."""
    return _multiply((g, w), ((g.ndim - 1,), (1,)), (GRADIENTS, VALUES), scaling, g.dtype)


def weight_gradient(
    x: Float[Array, "*batch inputs"] | Rounded, g: Float[Array, "*batch outputs"], scaling: Scaling
) -> Float[Array, "inputs outputs"]:
    """The gradient of w from that of x @ w."""
    rows = tuple(range(x.ndim - 1))
    return _multiply((x, g), (rows, rows), (VALUES, GRADIENTS), scaling, g.dtype)


def _multiply(
    operands: tuple[jax.Array | Rounded, jax.Array | Rounded],
    contracted: tuple[tuple[int, ...], tuple[int, ...]],
    formats: tuple[DTypeLike, DTypeLike],
    scaling: Scaling,
    dtype: DTypeLike,
) -> jax.Array:
    """The dot of two arrays in float8; the second one has one dimension that is not contracted."""
    along_a, along_b = contracted if scaling == "row" else (None, None)
    a, a_scale = _rounded(operands[0], formats[0], along_a)
    b, b_scale = _rounded(operands[1], formats[1], along_b)
    # Without the barrier, XLA joins dots that share an operand, and computes the joined dot in bfloat16.
    a, b = jax.lax.optimization_barrier((a, b))
    a = a.astype(dtype)
    b = b.astype(dtype)
    if scaling == "tensor":  # XLA passes the scale of an operand to cuBLASLt
        a = a * a_scale.astype(dtype)
        b = b * b_scale.astype(dtype)
    with jax.named_scope(SCOPE):
        y = jax.lax.dot_general(a, b, (contracted, ((), ())))
    if scaling == "row":
        a_scale = jnp.squeeze(a_scale, along_a)[..., None]
        b_scale = jnp.squeeze(b_scale, along_b)
        y = y * a_scale.astype(dtype) * b_scale.astype(dtype)
    return y


def _rounded(
    x: jax.Array | Rounded, dtype: DTypeLike, along: tuple[int, ...] | None
) -> tuple[jax.Array, Float[Array, "..."]]:
    """x / scale in float8 `dtype`, and the scale, a power of two: one for all values, or one for those that differ only
    in the dimensions `along`."""
    if isinstance(x, Rounded):
        return jax.lax.bitcast_convert_type(x.codes, dtype), x.scale
    largest = jnp.max(jnp.abs(x), axis=along, keepdims=along is not None).astype(jnp.float32)
    scale = _next_power_of_two(largest / float(jnp.finfo(dtype).max))
    return _divided(x, scale, dtype), scale


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _divided(x: jax.Array, scale: jax.Array, dtype: DTypeLike) -> jax.Array:
    """One operation, which recompute policies recognize: a scale may be saved for the backward pass, a weight in
    float8 is not."""
    return (x.astype(jnp.float32) / scale).astype(dtype)


def _no_derivative(*_: Any) -> Any:
    raise TypeError("rounding to float8 has no derivative")


_divided.defvjp(_no_derivative, _no_derivative)


def _next_power_of_two(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """The least power of two that is not below x >= 0, at least the smallest normal number; infinity for infinity."""
    bits = jax.lax.bitcast_convert_type(jnp.maximum(x, jnp.finfo(jnp.float32).tiny), jnp.int32)
    mantissa = jnp.int32(0x007FFFFF)
    return jax.lax.bitcast_convert_type((bits + mantissa) & ~mantissa, jnp.float32)
