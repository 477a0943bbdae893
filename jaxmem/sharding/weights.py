"""Stored weights, and the arrays that receive their gradients.

A quantized weight has no derivative, but its dequantized values do. A `StoredWeight` pairs a weight with an array of
zeros that has the shape and dtype of its gradient. `sharding.gather` and the embedding lookup compute with the stored
weight, and return its gradient as the gradient of the zeros. XLA removes the zeros, since their values are not used.

    at = differentiable(params, jnp.bfloat16)
    grads = jax.grad(lambda at: loss(with_gradients(params, at)))(at)

A `PartialStack` is a stack of layers of which only some are trainable. `stack.apply_stack` divides it into ranges of
layers in which every weight is either trainable or frozen, so networks only receive `StoredWeight`.

A `HookedWeight` applies a function to its gradient. For stacked weights this happens in the backward pass of each
layer, where `apply_hooks` is called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxmem.quant import QTensor


class _HasShape:
    """The shape of the stored array."""

    stored: jax.Array | QTensor

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    @property
    def ndim(self) -> int:
        return self.stored.ndim


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StoredWeight(_HasShape):
    """A stored weight (possibly quantized) and an array of zeros to differentiate with respect to. `at=None`:
    frozen."""

    stored: jax.Array | QTensor
    at: jax.Array | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PartialStack(_HasShape):
    """Stacked weights of which only these layers are trainable; `at` receives their gradients, stacked."""

    stored: jax.Array | QTensor
    at: jax.Array | HookedWeight
    layers: tuple[int, ...] = field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class HookedWeight:
    """An array used as a weight. `at` receives `hook(gradient, beside)` as its gradient."""

    value: jax.Array
    at: jax.Array  # zeros with the shape of the hook's result; not read
    beside: jax.Array  # sliced into layers together with the weight
    hook: Callable[[jax.Array, jax.Array], jax.Array] = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape

    @property
    def ndim(self) -> int:
        return self.value.ndim

    @property
    def dtype(self) -> jnp.dtype:
        return self.value.dtype

    def apply(self) -> jax.Array:
        return _hooked(self.hook, self.value, self.at, self.beside)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _hooked(_: Callable[..., jax.Array], value: jax.Array, _at: jax.Array, _beside: jax.Array) -> jax.Array:
    return value


def _hooked_backward(hook: Callable[..., jax.Array], beside: jax.Array, g: jax.Array) -> tuple[Any, ...]:
    return None, hook(g, beside), None


_hooked.defvjp(lambda _, value, _at, beside: (value, beside), _hooked_backward)


def apply_hooks(tree: Any) -> Any:
    """The tree of weights, with each `HookedWeight` replaced by an array whose backward pass applies the hook."""
    is_hooked = lambda w: isinstance(w, HookedWeight)  # noqa: E731
    return jax.tree.map(lambda w: w.apply() if is_hooked(w) else w, tree, is_leaf=is_hooked)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class WithRemainder:
    """A float32 value as a bfloat16 weight and the remaining 16 bits, or the first 8 of them. The remainder is added to
    the bits of the weight as an integer, so its unit is 2^-16 (2^-8) of the last bit of the bfloat16 value."""

    weight: jax.Array
    remainder: jax.Array  # int16 or int8
    dtype: ClassVar = jnp.dtype(jnp.float32)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    @property
    def ndim(self) -> int:
        return self.weight.ndim

    def dequantize(self, dtype: DTypeLike = jnp.float32) -> jax.Array:
        high = jax.lax.bitcast_convert_type(self.weight, jnp.uint16).astype(jnp.int32) << 16
        low = self.remainder.astype(jnp.int32) << (16 - 8 * self.remainder.dtype.itemsize)
        return jax.lax.bitcast_convert_type(high + low, jnp.float32).astype(dtype)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GatheredWeight:
    """A weight that is already gathered and in the compute dtype."""

    value: jax.Array


Weight: TypeAlias = jax.Array | QTensor | StoredWeight


def is_quantized(x: Any) -> bool:
    """Whether a weight has to be dequantized for computation."""
    return isinstance(x, QTensor | WithRemainder)


def differentiable(params: Any, dtype: DTypeLike | None = None) -> Any:
    """The arrays to differentiate with respect to: each weight that has this dtype, and zeros of this dtype for any
    other weight. With `dtype` None, the dtype of each weight."""

    def one(w: jax.Array | QTensor) -> jax.Array:
        wanted = jnp.dtype(w.dtype if dtype is None else dtype)
        return w if isinstance(w, jax.Array) and w.dtype == wanted else jnp.zeros(w.shape, wanted)

    return jax.tree.map(one, params, is_leaf=is_quantized)


def with_gradients(params: Any, at: Any, partial: Mapping[Any, tuple[int, ...]] = MappingProxyType({})) -> Any:
    """Weights whose gradients are those of `at`; weights with None in `at` are frozen. `partial` maps the path of a
    stack to its trainable layers, which `at` contains."""

    def one(path: Any, w: jax.Array | QTensor, at: jax.Array | None) -> Weight | PartialStack:
        if at is not None and path in partial:
            return PartialStack(w, at, partial[path])
        return at if at is not None and isinstance(w, jax.Array) and w.dtype == at.dtype else StoredWeight(w, at)

    return jax.tree_util.tree_map_with_path(one, params, at, is_leaf=is_quantized)
