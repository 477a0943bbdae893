"""Weights, normalization and dropout, which all networks use.

The shape, logical axes and initializer of a weight are declared in one place. A weight has its own stored dtype and
sharding; `fetch` returns it gathered, in the compute dtype. Matmuls run in the dtype of their input; normalization,
rotary embeddings and softmax run in float32.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Key

from jaxmem.models.vocab_slices import initialize_in_slices
from jaxmem.sharding.gathering import gather
from jaxmem.sharding.table import Axes
from jaxmem.sharding.weights import store_new
from jaxmem.stack.remat import recompute_from_inputs

Ids = Int[Array, "batch time"]  # one integer per token: its id, position or document
Features = Float[Array, "batch time embed"]
Modules = dict[str, Any]  # the modules of a part of a layer, by name
RowKeys = Key[Array, "batch"]  # a random key for each row of the batch
Keys = Key[Array, "*rows"]


def new_weight(rngs: nnx.Rngs, shape: tuple[int, ...], axes: Axes, *, scale: float | None = None) -> nnx.Param:
    """Normally distributed values with standard deviation `scale`, by default 1/sqrt(fan in); fan in is the number of
    elements divided by the last dimension."""
    deviation = float(np.prod(shape[:-1])) ** -0.5 if scale is None else scale

    def draw(key: jax.Array, shape: tuple[int, ...]) -> Any:
        return store_new(deviation * jax.random.normal(key, shape, jnp.float32), axes)

    return nnx.Param(initialize_in_slices(draw, rngs.params(), shape, axes), axes=axes)


def new_constant(value: float, shape: tuple[int, ...], axes: Axes) -> nnx.Param:
    return nnx.Param(store_new(jnp.full(shape, value, jnp.float32), axes), axes=axes)


def fetch(param: nnx.Param, dtype: DTypeLike) -> jax.Array:
    """The weight, gathered and in `dtype`. Within a stack it has no leading axis `layer`."""
    value = param.get_value()
    return gather(value, axes_of(param, value.ndim), dtype)


def add_bias(y: Float[Array, "*batch outputs"], bias: Float[Array, "outputs"]) -> Float[Array, "*batch outputs"]:
    """y + bias, for a bias in float32, so that its gradient is summed over tokens in float32."""
    return (y.astype(jnp.float32) + bias).astype(y.dtype)


def axes_of(param: nnx.Param, ndim: int) -> Axes:
    """The logical axes of the last `ndim` dimensions."""
    axes: Axes = param.get_metadata()["axes"]
    return axes[len(axes) - ndim :]


def normalize(
    epsilon: float, x: jax.Array, scale: jax.Array, bias: jax.Array | None = None, *, offset: float = 0.0
) -> jax.Array:
    """RMS norm, or layer norm if it has a bias; multiplied by scale + offset."""
    wide = x.astype(jnp.float32)
    if bias is not None:
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon)
    wide = wide * (scale + offset if offset else scale)
    return (wide if bias is None else wide + bias).astype(x.dtype)


class RMSNorm(nnx.Module):
    """x / sqrt(mean x^2) * (scale + offset) (Zhang and Sennrich, arXiv:1910.07467), in float32."""

    def __init__(self, size: int, epsilon: float, axis: str | None = "norm", offset: float = 0.0):
        self.scale = new_constant(1.0 - offset, (size,), (axis,))
        self.epsilon = epsilon
        self.offset = offset

    def __call__(self, x: Float[Array, "*batch size"]) -> Float[Array, "*batch size"]:
        norm = partial(normalize, self.epsilon, offset=self.offset)
        return recompute_from_inputs(norm, x, fetch(self.scale, jnp.float32))


class LayerNorm(nnx.Module):
    """(x - mean) / standard deviation * scale + bias, in float32."""

    def __init__(self, size: int):
        self.scale = new_constant(1.0, (size,), ("norm",))
        self.bias = new_constant(0.0, (size,), ("norm",))

    def __call__(self, x: Float[Array, "*batch size"]) -> Float[Array, "*batch size"]:
        scale = fetch(self.scale, jnp.float32)
        bias = fetch(self.bias, jnp.float32)
        return recompute_from_inputs(partial(normalize, 1e-5), x, scale, bias)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def soft_cap(x: Float[Array, "*shape"], cap: float) -> Float[Array, "*shape"]:
    """cap tanh(x / cap) (Gemma Team, arXiv:2408.00118). Saves its result for the backward pass."""
    return cap * jnp.tanh(x / cap)


def soft_cap_slope(capped: Float[Array, "*shape"], cap: float) -> Float[Array, "*shape"]:
    """The derivative of `soft_cap`, from its result."""
    return 1.0 - jnp.square(capped / cap)


soft_cap.defvjp(lambda x, cap: (soft_cap(x, cap),) * 2, lambda cap, capped, g: (g * soft_cap_slope(capped, cap),))


def dropout(x: Float[Array, "*shape"], rate: float, keys: Keys | None) -> Float[Array, "*shape"]:
    """Dropout with `keys` for the first dimensions of x: the mask of a row or token depends only on its own key, for
    any sharding of x. Without keys there is no dropout, as in evaluation."""
    if keys is None or rate == 0.0:
        return x

    def draw(key: jax.Array) -> jax.Array:
        return jax.random.bernoulli(key, 1.0 - rate, x.shape[keys.ndim :])

    for _ in range(keys.ndim):
        draw = jax.vmap(draw)
    return jnp.where(draw(keys), x / (1.0 - rate), jnp.zeros_like(x))


def fold_keys(keys: Keys | None, count: int) -> tuple[Keys | None, ...]:
    """`count` new keys from each key."""
    if keys is None:
        return (None,) * count
    fold: Callable[..., Any] = jax.random.fold_in
    for _ in range(keys.ndim):
        fold = jax.vmap(fold, in_axes=(0, None))
    return tuple(fold(keys, number) for number in range(count))


def split_keys(keys: RowKeys, count: int) -> Key[Array, "count batch"]:
    """`count` keys for each row, for layers or for the dropouts of a layer."""
    return jax.vmap(lambda key: jax.random.split(key, count), out_axes=1)(keys)
