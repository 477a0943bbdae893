"""Matrix multiplications in FP8: weights and activations in e4m3, gradients in e5m2 (Micikevicius et al.,
arXiv:2209.05433).

Each operand is divided by scales that bring its largest absolute values into the range of the format, and rounded.
`tensor`: one scale per operand. `row`: one per row of the left operand and one per column of the right operand, so an
outlier costs precision in its row only; results are multiplied by both. `mxfp8`: one per 32 values along the contracted
dimension (OCP Microscaling Formats 1.0); so few gradients need only the range of e4m3. Rows and blocks are those of a
device's shard. A scale is computed from the values that it scales, so no history is stored. Scales are powers of two:
they round nothing, and values that share a scale in one layout of devices or chunks but not in another are rounded
alike, unless they are below the range of the format.

XLA compiles a dot of values converted from float8 to an FP8 matmul of cuBLASLt, which sums in float32. Matmuls with
block scales are calls of cuDNN. CPUs multiply the same rounded values in the compute dtype.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.experimental.layout import Layout, with_layout_constraint
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxmem.config.base import Scaling
from jaxmem.sharding.arrays import map_dot
from jaxmem.sharding.layout import current
from jaxmem.sharding.table import Axes, axis_name

SCOPE = "fp8_matmul"  # the scope of the dots, by which plans recognize them
MIN_CAPABILITY = 89  # the first GPUs with FP8 matmuls have compute capability 8.9
MXFP8_MAJOR = 10  # cuDNN documents matmuls with block scales for compute capability 10.x, not for 12.x
VALUES, GRADIENTS = jnp.float8_e4m3fn, jnp.float8_e5m2
BLOCK = 32  # values per scale of `mxfp8`
Dims = tuple[int, ...]
Shards = Sequence[tuple[str, ...]]  # the mesh axes that shard each dimension of an array


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
    axes: Axes | None = None,
) -> Float[Array, "*batch outputs"]:
    """x @ w in `dtype`. An operand that is rounded already requires the scaling `tensor`. `axes`: the logical axes of
    w; None: both are on one device."""
    *rows, inputs, outputs = _shards(axes, x.ndim)
    shards = (*rows, inputs), (inputs, outputs)
    return _multiply((x, w), ((x.ndim - 1,), (0,)), (VALUES, VALUES), scaling, dtype, shards)


def input_gradient(
    g: Float[Array, "*batch outputs"],
    w: Float[Array, "inputs outputs"] | Rounded,
    scaling: Scaling,
    axes: Axes | None = None,
) -> Float[Array, "*batch inputs"]:
    """g @ w.T, the gradient of x from that of x @ w."""
    *rows, inputs, outputs = _shards(axes, g.ndim)
    shards = (*rows, outputs), (inputs, outputs)
    return _multiply((g, w), ((g.ndim - 1,), (1,)), (GRADIENTS, VALUES), scaling, g.dtype, shards)


def weight_gradient(
    x: Float[Array, "*batch inputs"] | Rounded,
    g: Float[Array, "*batch outputs"],
    scaling: Scaling,
    axes: Axes | None = None,
) -> Float[Array, "inputs outputs"]:
    """The gradient of w from that of x @ w."""
    *rows, inputs, outputs = _shards(axes, x.ndim)
    shards = (*rows, inputs), (*rows, outputs)
    dims = tuple(range(x.ndim - 1))
    return _multiply((x, g), (dims, dims), (VALUES, GRADIENTS), scaling, g.dtype, shards)


def _shards(axes: Axes | None, ndim: int) -> Shards:
    """The mesh axes that shard the dimensions of x, and the outputs of x @ w."""
    layout = current()
    if layout is None or axes is None:
        return [()] * (ndim + 1)
    names = [axis and axis_name(axis) for axis in axes]
    rows = ("batch", "mlp_time" if "mlp" in names else "time")
    return layout.mesh_axes_each("activations", (*rows[: ndim - 1], *names))


def _multiply(
    operands: tuple[jax.Array | Rounded, jax.Array | Rounded],
    contracted: tuple[Dims, Dims],
    formats: tuple[DTypeLike, DTypeLike],
    scaling: Scaling,
    dtype: DTypeLike,
    shards: tuple[Shards, Shards],
) -> jax.Array:
    """The dot of two arrays in float8; the second one has one dimension that is not contracted."""
    if scaling == "tensor":
        return _dot_of_scaled(contracted, dtype, *operands, formats=formats, by_row=False)
    x, y = operands
    assert not isinstance(x, Rounded)
    assert not isinstance(y, Rounded)
    # On the shards of each device: XLA's partitioner does not shard calls of cuDNN, and the scales of sharded rows
    # would multiply the sum over devices, which XLA would then all-reduce and not reduce-scatter.
    of_rows = partial(_dot_of_scaled, formats=formats, by_row=True)
    dot: Callable[..., jax.Array] = of_rows if scaling == "row" else _dot_of_blocks

    def of_shards(a: jax.Array, b: jax.Array) -> jax.Array:
        # Otherwise XLA transposes the stack of all layers from which a saved x is sliced.
        return dot(contracted, dtype, _row_major(a), _row_major(b))

    return map_dot(of_shards, contracted, shards)(x, y)


def _row_major(x: jax.Array) -> jax.Array:
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def _dot_of_scaled(
    contracted: tuple[Dims, Dims],
    dtype: DTypeLike,
    a: jax.Array | Rounded,
    b: jax.Array | Rounded,
    *,
    formats: tuple[DTypeLike, DTypeLike],
    by_row: bool,
) -> jax.Array:
    """The dot of two arrays with a scale each, or with a scale for each row that is contracted."""
    along_a, along_b = contracted if by_row else (None, None)
    a_values, a_scale = _rounded(a, formats[0], along_a)
    b_values, b_scale = _rounded(b, formats[1], along_b)
    # Without the barrier, XLA joins dots that share an operand, and computes the joined dot in bfloat16.
    a_values, b_values = jax.lax.optimization_barrier((a_values, b_values))
    a_values = a_values.astype(dtype)
    b_values = b_values.astype(dtype)
    if not by_row:  # XLA passes the scale of an operand to cuBLASLt
        a_values = a_values * a_scale.astype(dtype)
        b_values = b_values * b_scale.astype(dtype)
    with jax.named_scope(SCOPE):
        y = jax.lax.dot_general(a_values, b_values, (contracted, ((), ())))
    if by_row:
        a_scale = jnp.squeeze(a_scale, along_a)[..., None]
        b_scale = jnp.squeeze(b_scale, along_b)
        y = y * a_scale.astype(dtype) * b_scale.astype(dtype)
    return y


def _dot_of_blocks(contracted: tuple[Dims, Dims], dtype: DTypeLike, a: jax.Array, b: jax.Array) -> jax.Array:
    """The dot of two arrays that are rounded in blocks along the contracted dimensions."""
    shapes = a.shape, b.shape
    blocks = [_rounded(_in_blocks(x, along), VALUES, (2,)) for x, along in zip((a, b), contracted, strict=True)]

    def fused(blocks: list[tuple[jax.Array, jax.Array]]) -> jax.Array:
        values = [x.reshape(1, x.shape[0], -1) for x, _ in blocks]
        scales = [_exponents(scale[None, ..., 0]) for _, scale in blocks]
        with jax.named_scope(SCOPE):
            y = _scaled_matmul(dtype)(*values, *scales)
        return y.reshape(*(size for dim, size in enumerate(shapes[0]) if dim not in contracted[0]), -1)

    def emulated(blocks: list[tuple[jax.Array, jax.Array]]) -> jax.Array:
        a, b = (
            _out_of_blocks(x.astype(dtype) * scale.astype(dtype), shape, along)
            for (x, scale), shape, along in zip(blocks, shapes, contracted, strict=True)
        )
        with jax.named_scope(SCOPE):
            return jax.lax.dot_general(a, b, (contracted, ((), ())))

    return jax.lax.platform_dependent(blocks, cpu=emulated, default=fused)


def _in_blocks(x: jax.Array, along: Dims) -> Float[Array, "kept blocks 32"]:
    """x with the dimensions `along` in blocks, the last of which is padded with zeros."""
    kept = [dim for dim in range(x.ndim) if dim not in along]
    rows = math.prod(x.shape[dim] for dim in kept)
    x = jax.lax.transpose(x, (*kept, *along)).reshape(rows, -1)
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % BLOCK))).reshape(rows, -1, BLOCK)


def _out_of_blocks(blocks: Float[Array, "kept blocks 32"], shape: Sequence[int], along: Dims) -> jax.Array:
    """The array of this shape of which `_in_blocks` makes these blocks."""
    order = (*(dim for dim in range(len(shape)) if dim not in along), *along)
    size = math.prod(shape[dim] for dim in along)
    x = blocks.reshape(blocks.shape[0], -1)[:, :size].reshape([shape[dim] for dim in order])
    return jax.lax.transpose(x, np.argsort(order))


def _exponents(scale: Float[Array, "*shape"]) -> jax.Array:
    """Powers of two in e8m0, the 8 bits of their exponents. Infinity becomes NaN."""
    bits = jax.lax.bitcast_convert_type(scale, jnp.uint32)
    return jax.lax.bitcast_convert_type((bits >> 23).astype(jnp.uint8), jnp.float8_e8m0fnu)


def _scaled_matmul(dtype: DTypeLike) -> Callable[..., jax.Array]:
    """`jax.nn.scaled_matmul`, of which `jax.vmap` maps all arrays or none: (a [batch, rows, width], b [batch, columns,
    width], their scales) -> [batch, rows, columns] in `dtype`."""

    @custom_vmap
    def run(a: jax.Array, b: jax.Array, a_scale: jax.Array, b_scale: jax.Array) -> jax.Array:
        return jax.nn.scaled_matmul(a, b, a_scale, b_scale, preferred_element_type=dtype)

    @run.def_vmap
    def run_mapped(size: int, is_mapped: Sequence[bool], *arrays: jax.Array) -> tuple[jax.Array, bool]:
        mapped = [
            x if is_mapped_x else jnp.broadcast_to(x, (size, *x.shape))
            for x, is_mapped_x in zip(arrays, is_mapped, strict=True)
        ]
        y = run(*(x.reshape(-1, *x.shape[2:]) for x in mapped))
        return y.reshape(size, -1, *y.shape[1:]), True

    return run


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
