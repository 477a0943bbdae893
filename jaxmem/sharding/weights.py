"""Stored weights, and the arrays that receive their gradients.

A quantized weight has no derivative, but its dequantized values do. A `StoredWeight` pairs a weight with an array of
zeros that has the shape and dtype of its gradient. `gathering.gather` and the embedding lookup compute with the stored
weight, and return its gradient as the gradient of the zeros. XLA removes the zeros, since their values are not used.

    proxies = differentiable(params, jnp.bfloat16)
    grads = jax.grad(lambda proxies: loss(with_gradients(params, proxies)))(proxies)

Of a stack of layers only some may be trainable (`layers`). `stack.apply.apply_call` divides it into ranges of
layers in which every weight is either trainable or frozen.

A `HookedWeight` applies a function to its gradient, where `apply_hooks` is called. For stacked weights this is in each
layer (`stack.apply.stack_call`), so the function is applied in the backward pass of the layer; if it is `in_place`, by
`stack.apply._scan_with_hooks`.

Code that computes with a weight asks `stored_of`, `proxy_of` and `frozen_of`, also for plain arrays.

`Storage` and `storing_as` determine how new weights are stored: their dtype or quantization format, and whether they
are in host memory.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, TypeAlias

import jax
import jax.numpy as jnp
from jax.tree_util import KeyPath
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxmem.config.sections import Precision
from jaxmem.quant import FORMATS, QTensor, even_block_size, quantize
from jaxmem.sharding.host import to_host
from jaxmem.sharding.table import Axes
from jaxmem.typing import Tree


class _LikeStored:
    """The shape and dtype of the stored array."""

    stored: Tree

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    @property
    def ndim(self) -> int:
        return self.stored.ndim

    @property
    def dtype(self) -> jnp.dtype:
        return self.stored.dtype


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StoredWeight(_LikeStored):
    """A stored weight (possibly quantized) and an array of zeros to differentiate with respect to."""

    stored: jax.Array | QTensor
    proxy: jax.Array | HookedWeight | None  # None: frozen
    # The trainable layers of a stack, of which `proxy` receives the gradients, stacked; None: all, or one layer.
    layers: tuple[int, ...] | None = field(default=None, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class HookedWeight(_LikeStored):
    """An array used as a weight. `proxy` receives `hook(gradient, argument)` as its gradient."""

    stored: jax.Array
    proxy: jax.Array  # zeros with the shape of the hook's result; not read
    argument: jax.Array  # sliced into layers together with the weight
    hook: Callable[[jax.Array, jax.Array], jax.Array] = field(metadata={"static": True})
    # Whether the hook's result has the shape and dtype of the argument. Then the backward pass of a stack writes the
    # results into the memory of the argument.
    in_place: bool = field(default=False, metadata={"static": True})

    def apply(self) -> jax.Array:
        return _hooked(self.hook, self.stored, self.proxy, self.argument)

    def gradient(self, of_proxy: jax.Array) -> HookedWeight:
        """The gradient of this weight, as a tree of the same structure: only `proxy` has one."""
        return dataclasses.replace(self, stored=None, proxy=of_proxy, argument=None)  # type: ignore[arg-type]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _hooked(_: Callable[..., jax.Array], value: jax.Array, _proxy: jax.Array, _argument: jax.Array) -> jax.Array:
    return value


_hooked.defvjp(
    lambda _, value, _proxy, argument: (value, argument), lambda hook, argument, g: (None, hook(g, argument), None)
)


def is_in_place(w: object) -> bool:
    return isinstance(w, HookedWeight) and w.in_place


def hooks_in_place(tree: Tree) -> list[HookedWeight]:
    return list(filter(is_in_place, jax.tree.leaves(tree, is_leaf=is_in_place)))


def without_hooks_in_place(tree: Tree) -> Tree:
    """The tree of weights, with the values of the weights of `hooks_in_place` in their place."""
    return jax.tree.map(lambda w: w.stored if is_in_place(w) else w, tree, is_leaf=is_in_place)


def apply_hooks(tree: Tree) -> Tree:
    """The tree of weights, with each `HookedWeight` replaced by an array whose backward pass applies the hook."""
    is_hooked = lambda w: isinstance(w, HookedWeight)  # noqa: E731
    return jax.tree.map(lambda w: w.apply() if is_hooked(w) else w, tree, is_leaf=is_hooked)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class WithRemainder(_LikeStored):
    """A float32 value as a bfloat16 weight and the remaining 16 bits, or the first 8 of them. The remainder is added to
    the bits of the weight as an integer, so its unit is 2^-16 (2^-8) of the last bit of the bfloat16 value."""

    stored: jax.Array
    remainder: jax.Array  # int16 or int8
    dtype: ClassVar = jnp.dtype(jnp.float32)

    def dequantize(self, dtype: DTypeLike = jnp.float32) -> jax.Array:
        high = jax.lax.bitcast_convert_type(self.stored, jnp.uint16).astype(jnp.int32) << 16
        low = self.remainder.astype(jnp.int32) << (16 - 8 * self.remainder.dtype.itemsize)
        return jax.lax.bitcast_convert_type(high + low, jnp.float32).astype(dtype)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GatheredWeight:
    """A weight that is already gathered and in the compute dtype."""

    value: jax.Array

    @property
    def ndim(self) -> int:
        return self.value.ndim


Weight: TypeAlias = jax.Array | QTensor | StoredWeight


def stored_of(weight: Weight) -> jax.Array | QTensor:
    """The array that a weight is stored as."""
    return weight.stored if isinstance(weight, StoredWeight) else weight


def proxy_of(weight: Weight) -> Tree:
    """The array whose gradient is the gradient of a weight: of a plain array the array itself; None: frozen."""
    return weight.proxy if isinstance(weight, StoredWeight) else weight


def with_proxy(weight: Weight, proxy: Tree) -> Weight:
    """The weight with another array in place of `proxy_of`."""
    return StoredWeight(weight.stored, proxy) if isinstance(weight, StoredWeight) else proxy


def frozen_of(weight: Weight) -> jax.Array | QTensor | None:
    """The stored array of a StoredWeight without a proxy, which a step does not train. None for all others, also for a
    bare array or QTensor: `proxy_of` returns these themselves."""
    return weight.stored if isinstance(weight, StoredWeight) and weight.proxy is None else None


def has_proxy(x: object) -> bool:
    """Whether a part of a tree is a weight with a separate array that receives its gradient."""
    return isinstance(x, StoredWeight | HookedWeight)


def is_encoded(x: object) -> bool:
    """Whether a weight is stored as several arrays, from which its values are decoded for computation."""
    return isinstance(x, QTensor | WithRemainder)


def differentiable(params: Tree, dtype: DTypeLike | None = None) -> Tree:
    """The arrays to differentiate with respect to: each weight that has this dtype, and zeros of this dtype for any
    other weight. With `dtype` None, the dtype of each weight."""

    def proxy(w: jax.Array | QTensor) -> jax.Array:
        target = jnp.dtype(w.dtype if dtype is None else dtype)
        return w if isinstance(w, jax.Array) and w.dtype == target else jnp.zeros(w.shape, target)

    return jax.tree.map(proxy, params, is_leaf=is_encoded)


def with_gradients(params: Tree, proxies: Tree, partial: Mapping[Any, tuple[int, ...]] = MappingProxyType({})) -> Tree:
    """Weights whose gradients are the gradients of `proxies`; weights with None there are frozen. `partial` maps the
    path of a stack to its trainable layers, which `proxies` contains."""

    def with_gradient(path: KeyPath, w: jax.Array | QTensor, proxy: jax.Array | None) -> Weight:
        if proxy is not None and path in partial:
            return StoredWeight(w, proxy, partial[path])
        if proxy is not None and isinstance(w, jax.Array) and w.dtype == proxy.dtype:  # see `differentiable`
            return proxy
        return StoredWeight(w, proxy)

    return jax.tree_util.tree_map_with_path(with_gradient, params, proxies, is_leaf=is_encoded)


MIN_BLOCK = 16  # least number of values per scale; with fewer, a quantized array could be larger than the original


@dataclass(frozen=True)
class Storage:
    """How a weight is stored between steps."""

    precision: Precision
    double_quant: bool | int = False  # whether the block scales are quantized too; a number: in groups of this size
    on_host: bool = False  # whether matrices are in host memory
    has_exact_blocks: bool = False  # whether blocks have the size in `precision` wherever it divides the dimension


def store(w: Float[Array, "*shape"], axes: Axes, storage: Storage, blocks_along: int = -2) -> jax.Array | QTensor:
    """Returns a new weight, or one layer of it, in the form in which it is stored between steps.

    Matrices are quantized in blocks along `blocks_along`, by default the dimension that a matmul sums over (`in` of
    [in, out]); matrices [vocab, embed] always along `embed`. With a quantized format, vectors, routers, and matrices
    with fewer than 16 values per column, stay in float32; with bfloat16 vectors do, unless `precision.master` stores
    the lower bits of every weight. Optimizers treat a quantized weight as bfloat16.
    """
    stored = _convert(w, axes, storage, blocks_along)
    return to_host(stored) if storage.on_host and is_matrix(axes) else stored


def is_matrix(axes: Axes) -> bool:
    """Whether a weight with these axes is a matrix, for each layer and each expert. All dimensions but one of a bias
    [heads, head_dim] have the axis `bias`."""
    return sum(axis not in ("layer", "expert", "bias") for axis in axes) > 1


def _convert(w: jax.Array, axes: Axes, storage: Storage, blocks_along: int) -> jax.Array | QTensor:
    precision = storage.precision
    if not precision.is_quantized:
        # bfloat16 values near 1, where scales of norms are, are too far apart for updates.
        is_float32 = precision.master == "none" and not is_matrix(axes)
        return w.astype(jnp.float32 if is_float32 else getattr(jnp, precision.parameters))
    axis = -1 if axes[:1] == ("vocab",) else blocks_along
    if not is_matrix(axes) or w.shape[axis] < MIN_BLOCK or "router" in axes:
        return w
    block = block_size_of(w.shape[axis], precision, is_exact=storage.has_exact_blocks)
    double_quant = storage.double_quant
    if not isinstance(double_quant, bool):
        double_quant = math.gcd(w.shape[axis] // block, double_quant)  # groups that do not extend over columns
    q = quantize(w, precision.parameters, block, axis, double_quant=double_quant)
    return dataclasses.replace(q, dtype="bfloat16")


def block_size_of(size: int, precision: Precision, *, is_exact: bool) -> int:
    """The values of a column of `size` values that share a scale. `is_exact`: as many as `precision` says, wherever it
    divides the column; otherwise a size with which columns have a multiple of 8 blocks, if possible."""
    limit = precision.block_size or FORMATS[precision.parameters].block_size
    most = min(limit, size)
    if (is_exact or precision.parameters == "mxfp4") and size % most == 0:
        return most
    return even_block_size(size, limit) or most


_storage: ContextVar[Storage | None] = ContextVar("storage", default=None)


@contextmanager
def storing_as(storage: Storage) -> Iterator[None]:
    """A context in which each weight that a module creates is stored in this form before the next one is created."""
    token = _storage.set(storage)
    try:
        yield
    finally:
        _storage.reset(token)


def store_new(w: Float[Array, "*shape"], axes: Axes) -> jax.Array | QTensor:
    """Returns a weight that a module just created in the form set by `storing_as`; outside of it, unchanged."""
    storage = _storage.get()
    return w if storage is None else store(w, axes, storage)
