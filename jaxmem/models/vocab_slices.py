"""Slices of an embedding or output matrix along the vocabulary.

These are the largest matrices of many models; their gradients, updates and logits are as large or larger.
`VocabSlices` divides the vocabulary so that only one slice of such an array exists at a time.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxmem.quant import QTensor
from jaxmem.sharding.host import fetch_from_host, is_on_host, send_like, zeros_on_host
from jaxmem.sharding.layout import shard_count
from jaxmem.sharding.table import Axes
from jaxmem.sharding.weights import Weight

# A slice as matmuls use it: each device along `tensor` has `width` columns of its own part of the vocabulary.
Columns = Float[Array, "embed parts width"]
Entries = Int[Array, "parts width"]  # the vocabulary entry of each column; -1: already in an earlier slice

SLICE_SIZE = 2**24  # elements of an embedding or output matrix processed at once: 64 MiB in float32


@dataclass(frozen=True)
class VocabSlices:
    """Slices of the vocabulary, which devices store in `stored_parts` parts. A slice has `width` entries of each part.

    If the last slice would extend beyond the end of a part, it begins earlier. Entries that are also in the previous
    slice are masked (-1 in `entries`).
    """

    vocab: int
    width: int
    stored_parts: int = 1  # parts of the vocabulary dimension in the stored weight
    parts: int = 1  # parts of the vocabulary dimension in matmuls
    prefetch: bool = False  # fetch the next slice while the current one is used: for weights that are gathered

    @property
    def part_size(self) -> int:
        """Entries of a part."""
        return self.vocab // self.stored_parts

    @property
    def count(self) -> int:
        """The number of slices.

        >>> VocabSlices(vocab=128256, width=2048).count
        63
        >>> VocabSlices(vocab=128256, width=2048, stored_parts=2, parts=2).count
        32
        """
        return -(-self.part_size // self.width)

    @property
    def size(self) -> int:
        """Entries of a slice, over all parts."""
        return self.width * self.stored_parts

    def entries(self, j: Int[Array, ""]) -> Entries:
        """The vocabulary entry of each column of slice j."""
        within = self._start(j) + jnp.arange(self.width, dtype=jnp.int32)
        first = self.part_size * jnp.arange(self.stored_parts, dtype=jnp.int32)
        numbers = jnp.where(within >= j * self.width, first[:, None] + within, -1)
        return numbers.reshape(self.parts, -1)

    def positions(self, ids: Int[Array, "*tokens"], j: Int[Array, ""]) -> Int[Array, "*tokens"]:
        """The row of each token id in slice j; `size` if the slice does not contain it."""
        within = ids % self.part_size - self._start(j)
        inside = (within >= 0) & (within < self.width)
        return jnp.where(inside, ids // self.part_size * self.width + within, self.size)

    def read_columns(self, weight: Any, axes: Axes, j: Int[Array, ""]) -> Any:
        """Slice j of a stored weight [embed, vocab] or [vocab, embed], as [embed, parts, width]. The blocks of a
        quantized weight are along `embed`."""
        if isinstance(weight, QTensor):
            read = partial(self.read_columns, axes=axes, j=j)
            codes = read(weight.codes)
            scale = read(weight.scale)
            offset = None if weight.offset is None else read(weight.offset)
            return dataclasses.replace(weight, codes=codes, scale=scale, offset=offset, axis=-3)
        dim = axes.index("vocab")
        if weight.shape[dim] == 1:  # one value for all entries
            return fetch_from_host(weight).reshape(-1, 1, 1)
        columns = jnp.moveaxis(self._read(weight, dim, j), (dim, dim + 1), (1, 2))
        return columns.reshape(columns.shape[0], self.parts, -1)

    def as_weight(self, columns: Columns, axes: Axes) -> Float[Array, "rows columns"]:
        """A slice [embed, parts, width] in the order of the weight's dimensions."""
        dim = axes.index("vocab")
        x = columns.reshape(columns.shape[0], self.stored_parts, self.width)
        x = jnp.moveaxis(x, (1, 2), (dim, dim + 1))
        return x.reshape(*x.shape[:dim], self.size, *x.shape[dim + 2 :])

    def read(self, x: jax.Array, dim: int, j: Int[Array, ""]) -> jax.Array:
        """Slice j, on the device, of an array whose dimension `dim` has one element per vocabulary entry, or per
        several entries."""
        rows = self._read(x, dim, j)
        return rows.reshape(*x.shape[:dim], -1, *x.shape[dim + 1 :])

    def write(self, x: jax.Array, dim: int, j: Int[Array, ""], new: jax.Array) -> jax.Array:
        """The array with slice j replaced, in the same memory."""
        new = send_like(new, x)
        new = new.reshape(*x.shape[:dim], self.stored_parts, -1, *x.shape[dim + 1 :])
        start = self._start(j) // self._entries_of_element(x, dim)
        return jax.lax.dynamic_update_slice_in_dim(self._split(x, dim), new, start, axis=dim + 1).reshape(x.shape)

    def _read(self, x: jax.Array, dim: int, j: Int[Array, ""]) -> jax.Array:
        part = x.shape[dim] // self.stored_parts
        start = self._start(j) // self._entries_of_element(x, dim)
        width = self.width // self._entries_of_element(x, dim)
        if width == part:  # the slice is the complete part
            return self._split(fetch_from_host(x), dim)
        if self.stored_parts == 1:  # not reshaped before the copy, which keeps the layout of the array in host memory
            rows = fetch_from_host(jax.lax.dynamic_slice_in_dim(x, start, width, axis=dim))
            return rows.reshape(*x.shape[:dim], 1, width, *x.shape[dim + 1 :])
        return fetch_from_host(jax.lax.dynamic_slice_in_dim(self._split(x, dim), start, width, axis=dim + 1))

    def _entries_of_element(self, x: jax.Array, dim: int) -> int:
        """The number of vocabulary entries that share an element of an array along `dim`."""
        return self.part_size * self.stored_parts // x.shape[dim]

    def _start(self, j: Int[Array, ""]) -> Int[Array, ""]:
        return jnp.minimum(j * self.width, self.part_size - self.width)

    def _split(self, x: jax.Array, dim: int) -> jax.Array:
        return x.reshape(*x.shape[:dim], self.stored_parts, -1, *x.shape[dim + 1 :])


def even_slices(vocab: int, width: int, sizes: set[int]) -> VocabSlices | None:
    """Slices of about `width` entries that do not overlap; None if the complete vocabulary is the nearest such slice.

    `sizes`: the lengths of the vocabulary dimension in the arrays to slice. A length is less than `vocab` if an
    element, e.g. a block scale, belongs to several entries; slices do not split these entries.

    >>> even_slices(128256, 4096, {128256, 768}).width, even_slices(50261, 4096, {50261})
    (4008, None)
    """
    stored = shard_count("optimizer", "vocab")
    parts = shard_count("compute", "vocab")
    if any(size % stored or vocab % size for size in sizes):
        return None
    part = vocab // stored
    common = math.gcd(*(size // stored for size in sizes))
    counts = [n for n in range(1, common + 1) if common % n == 0 and vocab // n % parts == 0]
    count = _nearest(counts, part / width) if counts else 1
    return None if count == 1 else VocabSlices(vocab, part // count, stored, parts)


def _nearest(counts: list[int], target: float) -> int:
    return min(counts, key=lambda n: abs(math.log(n / target)))


def initialize_in_slices(
    draw: Callable[[jax.Array, tuple[int, ...]], Any], key: jax.Array, shape: tuple[int, ...], axes: Axes
) -> Any:
    """A new weight, `draw(key, shape)`. An embedding or output matrix of more than 16 M elements is drawn in slices,
    each with its own key, so that at most one slice exists before it is stored (quantized, sharded)."""
    min_slices = math.prod(shape) / SLICE_SIZE
    if "vocab" not in axes or min_slices <= 1:
        return draw(key, shape)
    dim = axes.index("vocab")
    count = _nearest([n for n in range(1, shape[dim] + 1) if shape[dim] % n == 0], min_slices)
    slices = VocabSlices(shape[dim], shape[dim] // count)
    slice_shape = (*shape[:dim], slices.width, *shape[dim + 1 :])

    def step(j: jax.Array, arrays: list[jax.Array]) -> list[jax.Array]:
        new = jax.tree.leaves(draw(jax.random.fold_in(key, j), slice_shape))
        return [slices.write(x, dim, j, values) for x, values in zip(arrays, map(fetch, new), strict=True)]

    arrays, structure = jax.tree.flatten(jax.eval_shape(lambda: draw(key, shape)))
    drawn = jax.tree.leaves(draw(key, slice_shape))
    # XLA does not support writes to shards in host memory, so there a matrix with shards of the vocabulary is complete
    # on the devices before it is copied to the host.
    fetch = fetch_from_host if shard_count("weights", "vocab") > 1 else lambda x: x
    make_zeros = [zeros_on_host if is_on_host(fetch(spec)) else jnp.zeros for spec in drawn]
    zeros = [make(x.shape, x.dtype) for make, x in zip(make_zeros, arrays, strict=True)]
    filled = jax.lax.fori_loop(0, count, step, zeros)
    return jax.tree.unflatten(structure, [send_like(x, spec) for x, spec in zip(filled, drawn, strict=True)])


@runtime_checkable
class WeightGradient(Protocol):
    def __call__(
        self, g: jax.Array, weight: Any, slices: VocabSlices | None = None, j: jax.Array | None = None, /
    ) -> jax.Array:
        """The gradient of slice j of a weight, without slices of all of it, from the gradient `g` of the result."""


@dataclass(frozen=True)
class VocabOpResult:
    """The result of a `VocabOp`, and its gradients."""

    y: jax.Array
    input_gradient: Callable[[jax.Array], jax.Array | None]  # from the gradient of y; None for token ids
    weight_gradient: WeightGradient


@dataclass(frozen=True)
class VocabOp:
    """An operation with an embedding or output matrix that has not run yet, passed to the handler of
    `stack.call.intercept_with`. The caller can compute each slice of the matrix gradient when it is needed, without the
    complete gradient."""

    weight: Weight
    x: jax.Array | None  # the input if it has a gradient
    forward: Callable[[], VocabOpResult]
