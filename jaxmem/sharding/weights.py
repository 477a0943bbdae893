"""Weights as they are stored, and what their gradients are computed with respect to.

A quantized weight has no derivative; the values that it is computed with have. A `StoredWeight` pairs such a weight
with an array of zeros that has the shape and dtype of its gradient. `sharding.gather` and the embedding lookup compute
with the stored weight and give the gradient to the zeros, which nothing reads: XLA drops them.

    at = differentiable(params, jnp.bfloat16)
    grads = jax.grad(lambda at: loss(with_gradients(params, at)))(at)

Of a stack of layers some may be trainable and others not: a `PartialStack`. `stack.apply_stack` splits it into runs of
layers in which every weight is either trainable or frozen, so that networks only see `StoredWeight`.

A `HookedWeight` is one whose gradient passes through a function first: for stacked weights in the backward pass of each
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
    """Stacked weights of which these layers are trainable; `at` has their gradients, stacked."""

    stored: jax.Array | QTensor
    at: jax.Array | HookedWeight
    layers: tuple[int, ...] = field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class HookedWeight:
    """An array in place of a weight, and where its gradient goes: to `at`, as `hook(gradient, beside)`."""

    value: jax.Array
    at: jax.Array  # of the hook's output shape; nothing reads it
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
    """A tree of weights with hooked ones replaced by arrays to compute with."""
    is_hooked = lambda w: isinstance(w, HookedWeight)  # noqa: E731
    return jax.tree.map(lambda w: w.apply() if is_hooked(w) else w, tree, is_leaf=is_hooked)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class WithRemainder:
    """A float32 value as a bfloat16 weight and the remaining bits: 16 of them, or the first 8. The remainder is added
    to the weight's bits as an integer, so that its unit is the 2^16th (2^8th) part of bfloat16's."""

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
    """Whether a weight has to be dequantized before it is computed with."""
    return isinstance(x, QTensor | WithRemainder)


def differentiable(params: Any, dtype: DTypeLike | None = None) -> Any:
    """What to differentiate with respect to: a weight of this dtype itself, zeros in place of any other. `dtype` None:
    each weight's own."""

    def one(w: jax.Array | QTensor) -> jax.Array:
        wanted = jnp.dtype(w.dtype if dtype is None else dtype)
        return w if isinstance(w, jax.Array) and w.dtype == wanted else jnp.zeros(w.shape, wanted)

    return jax.tree.map(one, params, is_leaf=is_quantized)


def with_gradients(params: Any, at: Any, partial: Mapping[Any, tuple[int, ...]] = MappingProxyType({})) -> Any:
    """Weights whose gradients go to `at`; where it has None, frozen weights. `partial`: by path, the layers of a stack
    that `at` has."""

    def one(path: Any, w: jax.Array | QTensor, at: jax.Array | None) -> Weight | PartialStack:
        if at is not None and path in partial:
            return PartialStack(w, at, partial[path])
        return at if at is not None and isinstance(w, jax.Array) and w.dtype == at.dtype else StoredWeight(w, at)

    return jax.tree_util.tree_map_with_path(one, params, at, is_leaf=is_quantized)
