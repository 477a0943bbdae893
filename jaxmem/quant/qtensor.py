"""An array kept in a few bits a value, with a constant for each block of values along one dimension.

Everything in it has the rank of the original, so that what says where the array lies on a mesh says where its codes
and its constants lie; a layer sliced from a stack, or one of a vmap, is a QTensor as well. With b bits a value and
blocks of k values it takes b + 32 / k bits a value (affine: b + 64 / k). With `double` the constants are quantized
themselves, to 8 bits in groups of up to 256 blocks: b + 8 / k and a little (nf4 in blocks of 64: 4.13 bits).
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Key, Shaped, UInt32

from jaxmem.errors import UserError, nearest
from jaxmem.kernels.draws import uniform
from jaxmem.quant.formats import FORMATS, Format
from jaxmem.quant.packing import pack, unpack, values_per_group

GROUP = 256  # constants at most that share one of the second level


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QTensor:
    """value = decode(code) * scale + offset, block by block."""

    codes: Shaped[Array, "*packed"]  # several to a byte along `axis` where they have fewer than 8 bits
    scale: Any  # float32, one for each block; or a QTensor of them
    offset: Float[Array, "*blocks"] | None
    format: str = field(metadata={"static": True})
    axis: int = field(metadata={"static": True})  # that blocks run along; counted from the end
    block_size: int = field(metadata={"static": True})
    size: int = field(metadata={"static": True})  # of the original along `axis`
    dtype: str = field(metadata={"static": True})  # of the original

    @property
    def shape(self) -> tuple[int, ...]:
        """The original's."""
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
        """The values, by default in the original's dtype."""
        form = FORMATS[self.format]
        codes = self.codes if form.bits == 8 else unpack(self.codes, form.bits, self.axis, self.size)
        scale = self.scale.dequantize() if isinstance(self.scale, QTensor) else self.scale
        values = _blocked(form.decode(codes), self.axis, self.block_size) * _beside(scale, self.axis)
        if self.offset is not None:
            values = values + _beside(self.offset, self.axis)
        return _flat(values, self.axis, self.size).astype(dtype or self.dtype)

    def cut(self, parts: int) -> QTensor | None:
        """The same values in blocks that no cut into equal parts along `axis` goes through; None where one would go
        through a byte."""
        part = self.size // parts
        if self.size % parts or part % values_per_group(FORMATS[self.format].bits):
            return None
        block = math.gcd(self.block_size, part)

        def repeated(constants: jax.Array | None) -> jax.Array | None:
            if constants is None:
                return None
            more = jnp.repeat(constants, self.block_size // block, axis=self.axis)
            return jax.lax.slice_in_dim(more, 0, self.size // block, axis=self.axis + self.ndim)

        scale = self.scale.dequantize() if isinstance(self.scale, QTensor) else self.scale
        return dataclasses.replace(self, scale=repeated(scale), offset=repeated(self.offset), block_size=block)

    def renewed(self, x: Float[Array, "*shape"], seeds: UInt32[Array, "*blocks"] | None = None) -> QTensor:
        """Other values in the same form: format, blocks, dtype of the original."""
        double = isinstance(self.scale, QTensor)
        new = quantize(x, self.format, self.block_size, self.axis, double=double, seeds=seeds)
        return dataclasses.replace(new, dtype=self.dtype)


@partial(jax.jit, static_argnames=("format", "block_size", "axis", "double"))
def quantize(
    x: Float[Array, "*shape"],
    format: str = "nf4",  # noqa: A002 - the word everybody uses
    block_size: int | None = 64,
    axis: int | None = -1,
    *,
    double: bool = False,
    key: Key[Array, ""] | None = None,
    seeds: UInt32[Array, "*blocks"] | None = None,
) -> QTensor:
    """Keep `x` in `format`, with a constant for each `block_size` values along `axis`.

    `block_size` None is one constant for each whole line along `axis` (a channel); `axis` None is one for all of x.
    A last block may be shorter. `double` quantizes the constants too. With a `key` values are rounded
    stochastically, or with a word for each block (`seeds`), of which that block's draws are made.

    >>> q = quantize(jnp.linspace(-1, 1, 256).reshape(2, 128), "int4", block_size=32)
    >>> q.shape, q.codes.shape, q.scale.shape, q.nbytes
    ((2, 128), (2, 64), (2, 4), 160)
    """
    form = _known(format)
    _check(x, block_size, axis)
    along = -1 if axis is None else axis - x.ndim if axis >= 0 else axis
    size = x.shape[along]
    block = max(1, size if block_size is None or axis is None else min(block_size, size))
    values = _blocked(x.astype(jnp.float32), along, block)
    dim = values.ndim + along
    over: Any = (dim,) if axis is not None else tuple(range(values.ndim))
    low, high = _range(values, form, over)
    draws = _draws(key, seeds, values, dim)
    inside = (values - low if form.affine else values) * _inverse(high)
    codes = _flat(form.encode(inside, draws), along, size)
    scale, offset = jnp.squeeze(high, dim), jnp.squeeze(low, dim) if form.affine else None
    if form.bits < 8:
        codes = pack(codes, form.bits, along)
    return QTensor(codes, _doubled(scale, along) if double else scale, offset, format, along, block, size, str(x.dtype))


def _draws(key: jax.Array | None, seeds: jax.Array | None, values: jax.Array, dim: int) -> jax.Array | None:
    """Of each value, by its place in its block; None: it is rounded to the nearest."""
    blocks = (*values.shape[:dim], *values.shape[dim + 1 :])
    if key is not None:
        seeds = jax.random.bits(key, blocks, jnp.uint32)
    if seeds is None:
        return None
    if seeds.shape != blocks:
        raise UserError(f"quantize: seeds have shape {seeds.shape}; there is a word for each block, {blocks}")
    return uniform(jnp.expand_dims(seeds, dim), jax.lax.broadcasted_iota(jnp.int32, values.shape, dim))


def even_block(size: int, most: int, parts: int = 8) -> int | None:
    """The largest block up to `most` of which a multiple of `parts` fills a dimension, so that usual meshes cut
    between blocks; None where that is less than a sixteenth of it.

    >>> even_block(4096, 256), even_block(11008, 256), even_block(5461, 256), even_block(5477, 256)
    (256, 172, 127, None)
    """
    each = size // math.gcd(size, parts)
    found = next(block for block in range(max(1, min(most, each)), 0, -1) if each % block == 0)
    return found if found >= most // 16 else None


def _doubled(scale: jax.Array, axis: int) -> QTensor:
    """Constants in 8 bits: what each differs from their mean (one for each matrix), in groups along `axis`."""
    matrix = {max(0, scale.ndim - 2), scale.ndim - 1, scale.ndim + axis}
    mean = jnp.mean(scale, axis=tuple(sorted(matrix)), keepdims=True)
    size = scale.shape[axis]
    groups = max(1, -(-size // GROUP))
    return dataclasses.replace(quantize(scale - mean, "dynamic8", -(-size // groups), axis), offset=mean)


def _range(values: jax.Array, form: Format, over: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Of each block the least and the span (affine), or the largest magnitude."""
    if form.affine:
        low = jnp.min(values, axis=over, keepdims=True, initial=jnp.inf)
        return low, jnp.max(values, axis=over, keepdims=True, initial=-jnp.inf) - low
    high = jnp.max(jnp.abs(values), axis=over, keepdims=True, initial=0.0)
    return jnp.zeros_like(high), high


def _blocked(x: jax.Array, axis: int, block: int) -> jax.Array:
    """Blocks of the dimension `axis` as a dimension of their own. A short last one repeats its last value."""
    dim, short = x.ndim + axis, -x.shape[axis] % block
    if short:
        x = jnp.pad(x, [(0, short if d == dim else 0) for d in range(x.ndim)], mode="edge")
    return x.reshape(*x.shape[:dim], x.shape[dim] // block, block, *x.shape[dim + 1 :])


def _flat(x: jax.Array, axis: int, size: int) -> jax.Array:
    """The inverse of `_blocked`."""
    dim = x.ndim + axis - 1
    joined = x.reshape(*x.shape[:dim], x.shape[dim] * x.shape[dim + 1], *x.shape[dim + 2 :])
    return jax.lax.slice_in_dim(joined, 0, size, axis=dim)


def _beside(constants: jax.Array, axis: int) -> jax.Array:
    """Constants of blocks where `_blocked` has their values."""
    return jnp.expand_dims(constants, constants.ndim + axis + 1)


def _inverse(x: jax.Array) -> jax.Array:
    """Of a block of zeros 0."""
    return jnp.where(x > 0, 1 / jnp.where(x > 0, x, 1), 0)


def _known(format: str) -> Format:  # noqa: A002
    if format not in FORMATS:
        raise UserError(f"format {format!r} is none{nearest(format, FORMATS)}; there are {', '.join(FORMATS)}")
    return FORMATS[format]


def _check(x: jax.Array, block_size: int | None, axis: int | None) -> None:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise UserError(f"quantize takes floating-point values, not {x.dtype}")
    if x.ndim == 0:
        raise UserError("quantize: a scalar has nothing to share its constant with; keep it as it is")
    if axis is not None and not -x.ndim <= axis < x.ndim:
        raise UserError(f"quantize: axis {axis} is none of an array of {x.ndim} dimensions")
    if block_size is not None and block_size < 1:
        raise UserError(f"quantize: block_size {block_size} should be 1 or more, or None for one block")
