"""Tables with a row or a column for each entry of a vocabulary, gone through some entries at a time.

An embedding and an output projection are the largest matrices of many models, and what is made of one (its gradient,
its update, logits) is as large or larger. `Slices` says how its entries are gone through. What computes
with such a matrix is a `Use`, which `stack.cut_by` gives to a caller: with the input, and the gradient of the output, a
caller computes any slice of the matrix's gradient when it needs it, and never all of it.
"""

from __future__ import annotations

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
from jaxmem.sharding import Axes, current
from jaxmem.sharding.host import fetch_from_host, is_on_host, send_like, zeros_on_host
from jaxmem.sharding.weights import Weight

# A slice as it is computed with: devices of `tensor` have `width` entries of their own part each.
Columns = Float[Array, "embed parts width"]
Entries = Int[Array, "parts width"]  # which entry of the vocabulary a column is; -1: none, it was in an earlier slice

NUMBERS = 2**24  # of a table that are worked on at once: 64 MiB in float32


@dataclass(frozen=True)
class Slices:
    """How a vocabulary is gone through: each of the parts in which the weight rests, `width` entries at a time. Where
    the last slice would reach beyond the end it begins earlier, and what was in another one is none of it."""

    vocab: int
    width: int
    resting: int = 1  # into how many parts the weight's vocabulary is split where it rests
    parts: int = 1  # and where it is computed with
    ahead: bool = False  # whether the next one is fetched beside the work on this one: where devices gather it

    @property
    def held(self) -> int:
        """Entries of a part."""
        return self.vocab // self.resting

    @property
    def count(self) -> int:
        """
        >>> Slices(vocab=128256, width=2048).count, Slices(vocab=128256, width=2048, resting=2, parts=2).count
        (63, 32)
        """
        return -(-self.held // self.width)

    @property
    def size(self) -> int:
        """Entries of a slice, of all parts together."""
        return self.width * self.resting

    def entries(self, j: Int[Array, ""]) -> Entries:
        within = self._begin(j) + jnp.arange(self.width, dtype=jnp.int32)
        first = self.held * jnp.arange(self.resting, dtype=jnp.int32)
        numbers = jnp.where(within >= j * self.width, first[:, None] + within, -1)
        return numbers.reshape(self.parts, -1)

    def places(self, ids: Int[Array, "*tokens"], j: Int[Array, ""]) -> Int[Array, "*tokens"]:
        """Where in a slice the entries are that tokens name; what is in none of its rows is at `size`."""
        within = ids % self.held - self._begin(j)
        return jnp.where((within >= 0) & (within < self.width), ids // self.held * self.width + within, self.size)

    def cut(self, weight: Any, axes: Axes, j: Int[Array, ""]) -> Any:
        """A slice out of the weight as it rests, [embed, vocab] or [vocab, embed]: [embed, parts, width]. Blocks of
        one in codes run along `embed`."""
        if isinstance(weight, QTensor):
            cut = partial(self.cut, axes=axes, j=j)
            codes, scale = cut(weight.codes), cut(weight.scale)
            offset = None if weight.offset is None else cut(weight.offset)
            return dataclasses.replace(weight, codes=codes, scale=scale, offset=offset, axis=-3)
        dim = axes.index("vocab")
        if weight.shape[dim] == 1:  # what all entries share
            return fetch_from_host(weight).reshape(-1, 1, 1)
        one = jnp.moveaxis(self._read(weight, dim, j), (dim, dim + 1), (1, 2))
        return one.reshape(one.shape[0], self.parts, -1)

    def put(
        self, weight: Float[Array, "rows columns"], axes: Axes, j: Int[Array, ""], one: Columns
    ) -> Float[Array, "rows columns"]:
        """The weight, or its gradient, with a slice of it replaced. From the last slice to the first: what a slice has
        of another is written over by that one."""
        return self.written(weight, axes.index("vocab"), j, self.laid(one, axes))

    def laid(self, one: Columns, axes: Axes) -> Float[Array, "rows columns"]:
        """A slice as it is computed with, as one of the weight."""
        dim = axes.index("vocab")
        one = jnp.moveaxis(one.reshape(one.shape[0], self.resting, self.width), (1, 2), (dim, dim + 1))
        return one.reshape(*one.shape[:dim], self.size, *one.shape[dim + 2 :])

    def read(self, x: jax.Array, dim: int, j: Int[Array, ""]) -> jax.Array:
        """A slice of any array of whose dimension `dim` each element stands for so many entries, on the device."""
        one = self._read(x, dim, j)
        return one.reshape(*x.shape[:dim], -1, *x.shape[dim + 1 :])

    def written(self, x: jax.Array, dim: int, j: Int[Array, ""], one: jax.Array) -> jax.Array:
        """The array with such a slice in its place."""
        one = send_like(one, x)
        one = one.reshape(*x.shape[:dim], self.resting, -1, *x.shape[dim + 1 :])
        begin = self._begin(j) * (x.shape[dim] // self.resting) // self.held
        return jax.lax.dynamic_update_slice_in_dim(self._split(x, dim), one, begin, axis=dim + 1).reshape(x.shape)

    def _read(self, x: jax.Array, dim: int, j: Int[Array, ""]) -> jax.Array:
        held = x.shape[dim] // self.resting
        begin, width = self._begin(j) * held // self.held, self.width * held // self.held
        if width == held:  # all of it
            return self._split(fetch_from_host(x), dim)
        if self.resting == 1:  # out of host memory comes what lies there, in its own form
            one = fetch_from_host(jax.lax.dynamic_slice_in_dim(x, begin, width, axis=dim))
            return one.reshape(*x.shape[:dim], 1, width, *x.shape[dim + 1 :])
        return fetch_from_host(jax.lax.dynamic_slice_in_dim(self._split(x, dim), begin, width, axis=dim + 1))

    def _begin(self, j: Int[Array, ""]) -> Int[Array, ""]:
        return jnp.minimum(j * self.width, self.held - self.width)

    def _split(self, x: jax.Array, dim: int) -> jax.Array:
        return x.reshape(*x.shape[:dim], self.resting, -1, *x.shape[dim + 1 :])


def even_slices(vocab: int, most: int, sizes: set[int]) -> Slices | None:
    """Slices of about `most` entries that have none in common and cut no element of dimensions of these sizes, which
    all stand for the vocabulary; None where there are none near that.

    >>> even_slices(128256, 4096, {128256, 768}).width, even_slices(50261, 4096, {50261})
    (4008, None)
    """
    layout, resting, parts = current(), 1, 1
    if layout is not None:
        resting, parts = layout.parts("optimizer", "vocab"), layout.parts("compute", "vocab")
    if any(size % resting or vocab % size for size in sizes):
        return None
    held, common = vocab // resting, math.gcd(*(size // resting for size in sizes))
    counts = [n for n in range(1, common + 1) if common % n == 0 and vocab // n % parts == 0]
    count = _nearest(counts, held / most) if counts else 1
    return None if count == 1 else Slices(vocab, held // count, resting, parts)


def _nearest(counts: list[int], wanted: float) -> int:
    return min(counts, key=lambda n: abs(math.log(n / wanted)))


def made(draw: Callable[[jax.Array, tuple[int, ...]], Any], key: jax.Array, shape: tuple[int, ...], axes: Axes) -> Any:
    """A new weight, `draw(key, shape)` as it rests. A table of more than 16 M numbers is drawn some entries at a time,
    each time with a key of their own, so that no more of them are ever there before they are brought to rest."""
    parts = math.prod(shape) / NUMBERS
    if "vocab" not in axes or parts <= 1:
        return draw(key, shape)
    dim = axes.index("vocab")
    count = _nearest([n for n in range(1, shape[dim] + 1) if shape[dim] % n == 0], parts)
    slices = Slices(shape[dim], shape[dim] // count)
    own = (*shape[:dim], slices.width, *shape[dim + 1 :])

    def step(j: jax.Array, whole: list[jax.Array]) -> list[jax.Array]:
        ones = jax.tree.leaves(draw(jax.random.fold_in(key, j), own))
        return [slices.written(x, dim, j, one) for x, one in zip(whole, ones, strict=True)]

    arrays, form = jax.tree.flatten(jax.eval_shape(lambda: draw(key, shape)))
    room = [zeros_on_host if is_on_host(one) else jnp.zeros for one in jax.tree.leaves(draw(key, own))]
    zeros = [make(x.shape, x.dtype) for make, x in zip(room, arrays, strict=True)]
    return jax.tree.unflatten(form, jax.lax.fori_loop(0, count, step, zeros))


@runtime_checkable
class Used(Protocol):
    """A table after it was computed with."""

    @property
    def y(self) -> jax.Array: ...

    def backward(self, g: jax.Array) -> jax.Array | None:
        """From the gradient of y that of what went in; None: numbers of tokens have none."""

    def of_weight(
        self, g: jax.Array, weight: jax.Array | QTensor, slices: Slices | None = None, j: jax.Array | None = None
    ) -> Float[Array, "rows columns"]:
        """And that of the weight, or of a slice of it, laid out as the weight."""


@runtime_checkable
class Use(Protocol):
    """A table that is about to be computed with."""

    @property
    def weight(self) -> Weight: ...

    @property
    def x(self) -> jax.Array | None:
        """What goes in, where that has a gradient."""

    def forward(self) -> Used: ...
