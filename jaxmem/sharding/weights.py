"""A weight and its gradient, where the two are not alike.

A weight that rests in codes has no derivative; what it is computed with, its values, has. A `Point` holds such a weight
and zeros of the form that its gradient shall have: the weight's shape, a dtype of its own. `sharding.gather` and
`exchange.lookup` compute with the weight and give the gradient to the zeros, which nothing reads: XLA drops them.

    at = points(params, jnp.bfloat16)
    grads = jax.grad(lambda at: loss(placed(params, at)))(at)

Of a stack some layers may have a gradient and the others none: `Some`. `stack.apply_stack` makes two or more stacks of
it, in each of which every weight is of one kind, so that networks only ever see a `Point`.

A `Hooked` weight is one whose gradient goes through a function before it is given to anyone: for weights of stacked
layers in each layer's own backward pass, where `unhooked` is called within the layer.
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


class _Formed:
    """Of the form of what it rests in."""

    rest: jax.Array | QTensor

    @property
    def shape(self) -> tuple[int, ...]:
        return self.rest.shape

    @property
    def ndim(self) -> int:
        return self.rest.ndim


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Point(_Formed):
    """What a weight rests in, and what its gradient is the gradient of; None: it has none."""

    rest: jax.Array | QTensor
    at: jax.Array | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Some(_Formed):
    """A stack of weights, and what the gradients of these layers are gradients of."""

    rest: jax.Array | QTensor
    at: jax.Array | Hooked
    layers: tuple[int, ...] = field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Hooked:
    """What stands for a weight, an array, and where its gradient goes: to `at`, as `back(gradient, beside)`."""

    value: jax.Array
    at: jax.Array  # of that one's form; nothing reads it
    beside: jax.Array  # cut into layers with the weight
    back: Callable[[jax.Array, jax.Array], jax.Array] = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape

    @property
    def ndim(self) -> int:
        return self.value.ndim

    @property
    def dtype(self) -> jnp.dtype:
        return self.value.dtype

    def unhooked(self) -> jax.Array:
        return _unhooked(self.back, self.value, self.at, self.beside)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _unhooked(_: Callable[..., jax.Array], value: jax.Array, _at: jax.Array, _beside: jax.Array) -> jax.Array:
    return value


def _unhooked_backward(back: Callable[..., jax.Array], beside: jax.Array, g: jax.Array) -> tuple[Any, ...]:
    return None, back(g, beside), None


_unhooked.defvjp(lambda _, value, _at, beside: (value, beside), _unhooked_backward)


def unhooked(tree: Any) -> Any:
    """A tree of weights as they are computed with."""
    is_hooked = lambda w: isinstance(w, Hooked)  # noqa: E731
    return jax.tree.map(lambda w: w.unhooked() if is_hooked(w) else w, tree, is_leaf=is_hooked)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Completed:
    """A bfloat16 weight and the bits of a float32 that it lacks: 16 of them, or the first 8. What the bits stand for
    is added to the weight's own, as an integer, so that each step is the 2^16th (2^8th) part of bfloat16's."""

    rest: jax.Array
    lacks: jax.Array  # int16 or int8
    dtype: ClassVar = jnp.dtype(jnp.float32)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.rest.shape

    @property
    def ndim(self) -> int:
        return self.rest.ndim

    def dequantize(self, dtype: DTypeLike = jnp.float32) -> jax.Array:
        high = jax.lax.bitcast_convert_type(self.rest, jnp.uint16).astype(jnp.int32) << 16
        low = self.lacks.astype(jnp.int32) << (16 - 8 * self.lacks.dtype.itemsize)
        return jax.lax.bitcast_convert_type(high + low, jnp.float32).astype(dtype)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Ready:
    """A weight that is where and in what it is computed with: nobody brings it again."""

    value: jax.Array


Weight: TypeAlias = jax.Array | QTensor | Point


def is_quantized(x: Any) -> bool:
    """Whether a weight has to be decoded."""
    return isinstance(x, QTensor | Completed)


def points(params: Any, dtype: DTypeLike | None = None) -> Any:
    """What to differentiate by: a weight of this dtype itself, zeros in the place of any other; None: each weight's
    own dtype."""

    def point(w: jax.Array | QTensor) -> jax.Array:
        wanted = jnp.dtype(w.dtype if dtype is None else dtype)
        return w if isinstance(w, jax.Array) and w.dtype == wanted else jnp.zeros(w.shape, wanted)

    return jax.tree.map(point, params, is_leaf=is_quantized)


def placed(params: Any, at: Any, some: Mapping[Any, tuple[int, ...]] = MappingProxyType({})) -> Any:
    """Weights whose gradients go to `at`; where that has None, weights that have none. `some`: by their paths, stacks
    of which `at` has these layers."""

    def place(path: Any, w: jax.Array | QTensor, at: jax.Array | None) -> Weight | Some:
        if at is not None and path in some:
            return Some(w, at, some[path])
        return at if at is not None and isinstance(w, jax.Array) and w.dtype == at.dtype else Point(w, at)

    return jax.tree_util.tree_map_with_path(place, params, at, is_leaf=is_quantized)
