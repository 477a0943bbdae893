"""The parts that every network here is made of. A weight's shape, axes and initialiser stand in one place.

Weights rest in their own dtype and place; `fetch` brings one to where and in what it is computed with.
Products run in the dtype of their input; normalisation, rotations and softmax in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Key

from jaxmem.config.recompute import MATMUL
from jaxmem.models import vocab_slices
from jaxmem.models.chunks import Long
from jaxmem.models.exchange import coded_product, lookup
from jaxmem.quant import QTensor
from jaxmem.sharding import Axes, gather, gather_with_input
from jaxmem.sharding.storage import store_new
from jaxmem.sharding.weights import GatheredWeight, StoredWeight
from jaxmem.stack import StackOptions, recompute_from_inputs

RowKeys = Key[Array, "batch"]  # a random key for each row of the batch
Keys = Key[Array, "*rows"]


@dataclass(frozen=True)
class Execution:
    """How a network runs, whatever its weights are."""

    dtype: np.dtype = np.dtype(np.float32)  # noqa: RUF009 - immutable
    attention: str | None = None  # an implementation's name; None: picked by device and shape
    deterministic: bool = False  # attention's gradients have the same bits each time
    long: Long = Long()  # noqa: RUF009 - immutable
    stack: StackOptions = StackOptions()  # noqa: RUF009 - immutable


def weight(rngs: nnx.Rngs, shape: tuple[int, ...], axes: Axes, *, scale: float | None = None) -> nnx.Param:
    """Normal values with deviation `scale`, by default 1/sqrt(fan in) where fan in is all but the last dimension."""
    if scale is None:
        scale = float(np.prod(shape[:-1])) ** -0.5

    def draw(key: jax.Array, shape: tuple[int, ...]) -> Any:
        return store_new(scale * jax.random.normal(key, shape, jnp.float32), axes)

    return nnx.Param(vocab_slices.made(draw, rngs.params(), shape, axes), axes=axes)


def constant(value: float, shape: tuple[int, ...], axes: Axes) -> nnx.Param:
    return nnx.Param(store_new(jnp.full(shape, value, jnp.float32), axes), axes=axes)


def fetch(param: nnx.Param, dtype: DTypeLike) -> jax.Array:
    """A weight as it is computed with. Inside a stack its leading axis `layer` is gone."""
    return fetch_for(None, param, dtype)[1]


def fetch_for(x: jax.Array | None, param: nnx.Param, dtype: DTypeLike) -> tuple[Any, jax.Array]:
    """And `x`, which it is multiplied with, as `gather_with_input` wants it."""
    value = param.get_value()
    if isinstance(value, GatheredWeight):
        return x, value.value.astype(dtype)
    return gather_with_input(x, value, axes_of(param, value.ndim), dtype)


def axes_of(param: nnx.Param, ndim: int) -> Axes:
    axes: Axes = param.get_metadata()["axes"]
    return axes[len(axes) - ndim :]


def frozen_codes(param: nnx.Param) -> QTensor | None:
    """Of a weight in codes that has no gradient."""
    value = param.get_value()
    frozen = isinstance(value, StoredWeight) and value.at is None and isinstance(value.stored, QTensor)
    return value.stored if frozen else None


class Linear(nnx.Module):
    def __init__(
        self,
        rngs: nnx.Rngs,
        inputs: int,
        outputs: int,
        axes: tuple[str | None, str | None],
        *,
        bias: bool = False,
        scale: float | None = None,
    ):
        self.weight = weight(rngs, (inputs, outputs), axes, scale=scale)
        self.bias = constant(0.0, (outputs,), axes[1:]) if bias else None
        self.lora: Any = nnx.data(None)  # what is learned beside a weight that stays: jaxmem.adapters
        self.coded: str | None = None  # how products with codes that stay run: an implementation's name; None: decoded

    def __call__(self, x: Float[Array, "*batch inputs"], keys: Keys | None = None) -> Float[Array, "*batch outputs"]:
        """`keys`, for the first dimensions of x, turn an adapter's dropout on."""
        codes = frozen_codes(self.weight)
        own, w = (x, None) if codes is not None else fetch_for(x, self.weight, x.dtype)
        y = self._coded(x, codes) if codes is not None else product(own, w)
        y = checkpoint_name(y, MATMUL)
        if self.lora is not None:
            y = self.lora(x, y, partial(fetch, self.weight, x.dtype) if w is None else lambda: w, keys)
        return y if self.bias is None else y + fetch(self.bias, x.dtype)

    def _coded(self, x: jax.Array, codes: QTensor) -> jax.Array:
        axes = axes_of(self.weight, 2)
        if self.coded is None:
            return decoded_product(x, codes, axes)
        return coded_product(x, codes, axes, self.coded)


@jax.custom_vjp
def product(x: Float[Array, "*batch inputs"], w: Float[Array, "inputs outputs"]) -> Float[Array, "*batch outputs"]:
    """x @ w, whose weight gradient is made in the weight's own order. jax makes its transpose and turns it round,
    which on CPUs copies activations (a quarter of a step's time)."""
    return x @ w


def _product_forward(x: jax.Array, w: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return x @ w, (x, w)


def _product_backward(kept: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, w = kept
    rows = tuple(range(x.ndim - 1))
    return g @ w.T, jax.lax.dot_general(x, g, ((rows, rows), ((), ())))


product.defvjp(_product_forward, _product_backward)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def decoded_product(x: Float[Array, "*batch inputs"], q: QTensor, axes: Axes) -> Float[Array, "*batch outputs"]:
    """x @ w of a weight that stays, in codes: decoded when x is there, and again when the gradient is. So of a layer
    one matrix at a time is there as numbers, not all from its first product to its last."""
    return x @ _decoded_beside(x, q, axes)


def _decoded_beside(x: jax.Array, q: QTensor, axes: Axes) -> jax.Array:
    x, q = jax.lax.optimization_barrier((x, q))
    return gather(q, axes, x.dtype)


def _coded_forward(x: jax.Array, q: QTensor, axes: Axes) -> tuple[jax.Array, QTensor]:
    return decoded_product(x, q, axes), q


def _coded_backward(axes: Axes, q: QTensor, g: jax.Array) -> tuple[jax.Array, None]:
    return g @ _decoded_beside(g, q, axes).T, None


decoded_product.defvjp(_coded_forward, _coded_backward)


def rows(table: nnx.Param, ids: Int[Array, "batch time"], dtype: DTypeLike) -> Float[Array, "batch time width"]:
    return lookup(table.get_value(), ids, table.get_metadata()["axes"], dtype)


class Embedding(nnx.Module):
    """A row for each token of a vocabulary."""

    def __init__(self, rngs: nnx.Rngs, vocab: int, embed: int):
        self.weight = weight(rngs, (vocab, embed), ("vocab", "embed"), scale=0.02)
        self.lora: Any = nnx.data(None)

    def __call__(self, ids: Int[Array, "batch time"], dtype: DTypeLike) -> Float[Array, "batch time embed"]:
        x = rows(self.weight, ids, dtype)
        return x if self.lora is None else x + self.lora.rows(ids, dtype)

    def project(self, x: Float[Array, "*batch embed"]) -> Float[Array, "*batch vocab"]:
        """Logits over the same rows, for tied embeddings."""
        return x @ fetch(self.weight, x.dtype).T


def _rms_norm(epsilon: float, x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon)
    return (wide * scale).astype(x.dtype)


def _layer_norm(epsilon: float, x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon)
    return (wide * scale + bias).astype(x.dtype)


class RMSNorm(nnx.Module):
    """x / sqrt(mean x^2) * scale (Zhang and Sennrich, arXiv:1910.07467), in float32."""

    def __init__(self, size: int, epsilon: float, axis: str | None = "norm"):
        self.scale = constant(1.0, (size,), (axis,))
        self.epsilon = epsilon

    def __call__(self, x: Float[Array, "*batch size"]) -> Float[Array, "*batch size"]:
        return recompute_from_inputs(partial(_rms_norm, self.epsilon), x, fetch(self.scale, jnp.float32))


class LayerNorm(nnx.Module):
    """(x - mean) / deviation * scale + bias, in float32."""

    def __init__(self, size: int, epsilon: float = 1e-5):
        self.scale = constant(1.0, (size,), ("norm",))
        self.bias = constant(0.0, (size,), ("norm",))
        self.epsilon = epsilon

    def __call__(self, x: Float[Array, "*batch size"]) -> Float[Array, "*batch size"]:
        scale, bias = fetch(self.scale, jnp.float32), fetch(self.bias, jnp.float32)
        return recompute_from_inputs(partial(_layer_norm, self.epsilon), x, scale, bias)


def dropout(x: Float[Array, "*shape"], rate: float, keys: Keys | None) -> Float[Array, "*shape"]:
    """Without keys nothing is dropped, as in evaluation. `keys` are for the first dimensions: what a row or a token
    loses depends on its own key alone, wherever it lies."""
    if keys is None or rate == 0.0:
        return x

    def draw(key: jax.Array) -> jax.Array:
        return jax.random.bernoulli(key, 1.0 - rate, x.shape[keys.ndim :])

    for _ in range(keys.ndim):
        draw = jax.vmap(draw)
    kept = draw(keys)
    return jnp.where(kept, x / (1.0 - rate), jnp.zeros_like(x))


def each(keys: Keys | None, count: int) -> tuple[Keys | None, ...]:
    """So many keys from each."""
    if keys is None:
        return (None,) * count
    fold: Callable[..., Any] = jax.random.fold_in
    for _ in range(keys.ndim):
        fold = jax.vmap(fold, in_axes=(0, None))
    return tuple(fold(keys, number) for number in range(count))


def several(keys: RowKeys, count: int) -> Key[Array, "count batch"]:
    """So many keys for each row: of layers, or of the places in one."""
    return jax.vmap(lambda key: jax.random.split(key, count), out_axes=1)(keys)


def layer_keys(keys: RowKeys | None, layers: int) -> Key[Array, "layers batch"] | None:
    return None if keys is None else several(keys, layers)
