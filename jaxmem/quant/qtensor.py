"""A quantized array: integer codes and a scale for each block of values along one dimension.

Codes and scales have the rank of the original, so that its sharding applies to them, and a layer sliced from a stack,
or one element of a vmap, is a QTensor too. With b bits and blocks of k values it takes b + 32 / k bits per value
(affine: b + 64 / k; mxfp4: b + 8 / k). Double quantization stores the scales in 8 bits, in groups of up to 256 blocks:
slightly more than b + 8 / k bits (4.13 for nf4 in blocks of 64; Dettmers et al., arXiv:2305.14314, section 3).
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Key, Shaped, UInt32

from jaxmem.errors import UserError, nearest
from jaxmem.kernels.codes import absmax
from jaxmem.quant.formats import FORMATS, Microscaled, pack, power_of_two, unpack, values_per_group
from jaxmem.typing import Tree

MAX_SCALE_GROUP = 256  # the most block scales that share a scale of the second level


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QTensor:
    """value = decode(code) * scale + offset, in each block."""

    codes: Shaped[Array, "*packed"]  # below 8 bits, several codes per byte along `axis`
    scale: Any  # float32, one per block; for mxfp4 uint8 (E8M0); with double quantization a QTensor
    offset: Float[Array, "*blocks"] | None  # the minimum of each block in affine formats
    format: str = field(metadata={"static": True})
    axis: int = field(metadata={"static": True})  # the dimension of the blocks, negative
    block_size: int = field(metadata={"static": True})
    size: int = field(metadata={"static": True})  # the size of the original along `axis`
    dtype: str = field(metadata={"static": True})  # the dtype of the original

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the original."""
        shape = list(self.codes.shape)
        shape[self.axis] = self.size
        return tuple(shape)

    @property
    def ndim(self) -> int:
        return self.codes.ndim

    @property
    def nbytes(self) -> int:
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(self))

    @partial(jax.jit, static_argnames="dtype")
    def dequantize(self, dtype: DTypeLike | None = None) -> Float[Array, "*shape"]:
        """The values, by default in the dtype of the original."""
        form = FORMATS[self.format]
        codes = unpack(self.codes, form.bits, self.axis, self.size)
        values = _split_blocks(form.decode(codes), self.axis, self.block_size) * _per_block(self.scales, self.axis)
        if self.offset is not None:
            values = values + _per_block(self.offset, self.axis)
        return _join_blocks(values, self.axis, self.size).astype(dtype or self.dtype)

    @property
    def scales(self) -> Float[Array, "*blocks"]:
        """The scale of each block, dequantized."""
        if isinstance(self.scale, QTensor):
            return self.scale.dequantize()
        return power_of_two(self.scale) if self.scale.dtype == jnp.uint8 else self.scale

    def with_aligned_blocks(self, parts: int) -> QTensor | None:
        """The same values, in blocks that do not cross the boundaries between `parts` equal parts of `axis`; None if a
        byte of packed codes would be split."""
        part = self.size // parts
        if self.size % parts or part % values_per_group(FORMATS[self.format].bits):
            return None
        block = math.gcd(self.block_size, part)

        def repeat(x: jax.Array | None) -> jax.Array | None:
            if x is None:
                return None
            repeated = jnp.repeat(x, self.block_size // block, axis=self.axis)
            return jax.lax.slice_in_dim(repeated, 0, self.size // block, axis=self.axis + self.ndim)

        return dataclasses.replace(self, scale=repeat(self.scales), offset=repeat(self.offset), block_size=block)

    def requantize(self, x: Float[Array, "*shape"], seeds: UInt32[Array, "*blocks"] | None = None) -> QTensor:
        """`x` quantized with the format, blocks and original dtype of this array."""
        double_quant = self.scale.block_size if isinstance(self.scale, QTensor) else False
        axis = None if self.axis == -1 and math.prod(self.scale.shape) == 1 else self.axis  # None: one scale for x
        new = quantize(x, self.format, self.block_size, axis, double_quant=double_quant, seeds=seeds)
        return dataclasses.replace(new, dtype=self.dtype)


def values_of(x: Tree, dtype: DTypeLike) -> jax.Array:
    """The values of an array that may be quantized."""
    if isinstance(x, jax.Array | np.ndarray):
        return jnp.asarray(x).astype(dtype)
    values: jax.Array = x.dequantize(dtype)
    return values


def with_sliced_sizes(part: Tree, complete: Tree) -> Tree:
    """A tree whose arrays are slices of those of `complete`; its QTensors get the `size` of their slices."""
    is_qtensor = lambda x: isinstance(x, QTensor)  # noqa: E731

    def resize(part: Tree, complete: Tree) -> Tree:
        if not is_qtensor(part):
            return part
        size = complete.size * part.codes.shape[part.axis] // complete.codes.shape[complete.axis]
        return dataclasses.replace(part, size=size, scale=with_sliced_sizes(part.scale, complete.scale))

    return jax.tree.map(resize, part, complete, is_leaf=is_qtensor)


@partial(jax.jit, static_argnames=("format", "block_size", "axis", "double_quant"))
def quantize(
    x: Float[Array, "*shape"],
    format: str = "nf4",  # noqa: A002 - the field's term
    block_size: int | None = 64,
    axis: int | None = -1,
    *,
    double_quant: bool | int = False,
    key: Key[Array, ""] | None = None,
    seeds: UInt32[Array, "*blocks"] | None = None,
) -> QTensor:
    """Quantizes `x`, with one scale per `block_size` values along `axis`. The last block may be shorter.

    Args:
        x: The values.
        format: A name in `FORMATS`.
        block_size: None: one scale per slice along `axis` (per channel).
        axis: None: one scale for x.
        double_quant: Also quantize the scales, in groups of up to 256 blocks, or `double_quant` blocks if it is a
            number; mxfp4 always has 8-bit scales.
        key: Rounding is stochastic; None: to nearest.
        seeds: A 32-bit seed per block, in place of `key`.

    >>> q = quantize(jnp.linspace(-1, 1, 256).reshape(2, 128), "int4", block_size=32)
    >>> q.shape, q.codes.shape, q.scale.shape, q.nbytes
    ((2, 128), (2, 64), (2, 4), 160)
    """
    _check(x, format, block_size, axis)
    form = FORMATS[format]
    along = -1 if axis is None else axis - x.ndim if axis >= 0 else axis
    size = x.shape[along]
    block = max(1, size if block_size is None or axis is None else min(block_size, size))
    values = _split_blocks(x.astype(jnp.float32), along, block)
    dim = values.ndim + along
    over: Any = (dim,) if axis is not None else tuple(range(values.ndim))
    low = jnp.min(values, axis=over, keepdims=True, initial=jnp.inf) if form.affine else None
    values = values if low is None else values - low
    largest = absmax(values, over, keepdims=True)
    scale: Any = largest  # as it is stored
    divisor = largest
    if isinstance(form, Microscaled):
        scale = form.scale_codes(largest)
        divisor = power_of_two(scale)
    inverse = jnp.where(divisor > 0, 1 / jnp.where(divisor > 0, divisor, 1), 0)  # 0 for a block of zeros
    codes = _join_blocks(form.encode(values * inverse, _draws(key, seeds, values, dim)), along, size)
    scale = jnp.squeeze(scale, dim)
    if double_quant and not isinstance(form, Microscaled):
        scale = _quantize_scales(scale, along, MAX_SCALE_GROUP if double_quant is True else double_quant)
    return QTensor(
        codes=pack(codes, form.bits, along),
        scale=scale,
        offset=None if low is None else jnp.squeeze(low, dim),
        format=format,
        axis=along,
        block_size=block,
        size=size,
        dtype=str(x.dtype),
    )


def even_block_size(size: int, limit: int, parts: int = 8) -> int | None:
    """The largest block size up to `limit` with which a dimension of `size` has a multiple of `parts` blocks, so that
    shards on common meshes end between blocks; None if it is below limit / 16.

    >>> even_block_size(4096, 256), even_block_size(11008, 256), even_block_size(5461, 256), even_block_size(5477, 256)
    (256, 172, 127, None)
    """
    part = size // math.gcd(size, parts)
    block_size = next(block for block in range(max(1, min(limit, part)), 0, -1) if part % block == 0)
    return block_size if block_size >= limit // 16 else None


def _draws(key: jax.Array | None, seeds: jax.Array | None, values: jax.Array, dim: int) -> jax.Array | None:
    """A random number for each value, from its position in the block; None: round to nearest."""
    blocks = (*values.shape[:dim], *values.shape[dim + 1 :])
    if key is not None:
        seeds = jax.random.bits(key, blocks, jnp.uint32)
    if seeds is None:
        return None
    if seeds.shape != blocks:
        raise UserError(f"quantize: seeds have shape {seeds.shape}; expected one seed per block, {blocks}")
    from jaxmem.kernels.draws import uniform

    return uniform(jnp.expand_dims(seeds, dim), jax.lax.broadcasted_iota(jnp.int32, values.shape, dim))


def _quantize_scales(scale: jax.Array, axis: int, group: int) -> QTensor:
    """Scales in 8 bits: their differences from their mean (one mean per matrix), in groups of up to `group` scales
    along `axis`."""
    matrix = {max(0, scale.ndim - 2), scale.ndim - 1, scale.ndim + axis}
    mean = jnp.mean(scale, axis=tuple(sorted(matrix)), keepdims=True)
    size = scale.shape[axis]
    groups = max(1, -(-size // group))
    return dataclasses.replace(quantize(scale - mean, "dynamic8", max(1, -(-size // groups)), axis), offset=mean)


def _split_blocks(x: jax.Array, axis: int, block: int) -> jax.Array:
    """The dimension `axis` as [blocks, block]. A short last block repeats its last value."""
    dim = x.ndim + axis
    padding = -x.shape[axis] % block
    if padding:
        x = jnp.pad(x, [(0, padding if d == dim else 0) for d in range(x.ndim)], mode="edge")
    return x.reshape(*x.shape[:dim], x.shape[dim] // block, block, *x.shape[dim + 1 :])


def _join_blocks(x: jax.Array, axis: int, size: int) -> jax.Array:
    """The inverse of `_split_blocks`."""
    dim = x.ndim + axis - 1
    joined = x.reshape(*x.shape[:dim], x.shape[dim] * x.shape[dim + 1], *x.shape[dim + 2 :])
    return jax.lax.slice_in_dim(joined, 0, size, axis=dim)


def _per_block(scale: jax.Array, axis: int) -> jax.Array:
    """Scales that broadcast against the values of `_split_blocks`."""
    return jnp.expand_dims(scale, scale.ndim + axis + 1)


def _check(x: jax.Array, format: str, block_size: int | None, axis: int | None) -> None:  # noqa: A002
    if format not in FORMATS:
        raise UserError(f"unknown format {format!r}{nearest(format, FORMATS)}")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise UserError(f"quantize supports floating-point arrays, not {x.dtype}")
    if x.ndim == 0:
        raise UserError("quantize does not support scalars; pass an array of at least one dimension")
    if axis is not None and not -x.ndim <= axis < x.ndim:
        raise UserError(f"quantize: axis={axis} is out of range for an array of {x.ndim} dimensions")
    if block_size is not None and block_size < 1:
        raise UserError(f"quantize: block_size={block_size}; expected a positive integer, or None for one block")
