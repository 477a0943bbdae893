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

from jaxmem import tables
from jaxmem.exchange import attention, lookup, places, spread
from jaxmem.models import cache as caches
from jaxmem.models.cache import Cache, Place
from jaxmem.models.chunks import Long, by_heads, by_tokens, groups_of_heads, joined, tokens_at_once
from jaxmem.models.rope import Angles, rotate
from jaxmem.precision import rested
from jaxmem.quant import QTensor
from jaxmem.sharding import Axes, constrain, current, gather
from jaxmem.stack import PRODUCT, Way
from jaxmem.weights import Point, Ready

RowKeys = Key[Array, "batch"]  # a random key for each row of the batch
Keys = Key[Array, "*rows"]


@dataclass(frozen=True)
class Execution:
    """How a network runs, whatever its weights are."""

    dtype: np.dtype = np.dtype(np.float32)  # noqa: RUF009 - immutable
    attention: str | None = None  # an implementation's name; None: picked by device and shape
    long: Long = Long()  # noqa: RUF009 - immutable
    stack: Way = Way()  # noqa: RUF009 - immutable


def weight(rngs: nnx.Rngs, shape: tuple[int, ...], axes: Axes, *, scale: float | None = None) -> nnx.Param:
    """Normal values with deviation `scale`, by default 1/sqrt(fan in) where fan in is all but the last dimension."""
    if scale is None:
        scale = float(np.prod(shape[:-1])) ** -0.5

    def draw(key: jax.Array, shape: tuple[int, ...]) -> Any:
        return rested(scale * jax.random.normal(key, shape, jnp.float32), axes)

    return nnx.Param(tables.made(draw, rngs.params(), shape, axes), axes=axes)


def constant(value: float, shape: tuple[int, ...], axes: Axes) -> nnx.Param:
    return nnx.Param(rested(jnp.full(shape, value, jnp.float32), axes), axes=axes)


def fetch(param: nnx.Param, dtype: DTypeLike) -> jax.Array:
    """A weight as it is computed with. Inside a stack its leading axis `layer` is gone."""
    value = param.get_value()
    if isinstance(value, Ready):
        return value.value.astype(dtype)
    axes: Axes = param.get_metadata()["axes"]
    return gather(value, axes[len(axes) - value.ndim :], dtype)


def axes_of(param: nnx.Param, ndim: int) -> Axes:
    axes: Axes = param.get_metadata()["axes"]
    return axes[len(axes) - ndim :]


def frozen_codes(param: nnx.Param) -> QTensor | None:
    """Of a weight in codes that has no gradient."""
    value = param.get_value()
    frozen = isinstance(value, Point) and value.at is None and isinstance(value.rest, QTensor)
    return value.rest if frozen else None


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

    def __call__(self, x: Float[Array, "*batch inputs"], keys: Keys | None = None) -> Float[Array, "*batch outputs"]:
        """`keys`, for the first dimensions of x, turn an adapter's dropout on."""
        codes = frozen_codes(self.weight)
        w = None if codes is not None else fetch(self.weight, x.dtype)
        y = product(x, w) if w is not None else coded_product(x, codes, axes_of(self.weight, 2))
        y = checkpoint_name(y, PRODUCT)
        if self.lora is not None:
            y = self.lora(x, y, partial(fetch, self.weight, x.dtype) if w is None else lambda: w, keys)
        return y if self.bias is None else y + fetch(self.bias, x.dtype)


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
def coded_product(x: Float[Array, "*batch inputs"], q: QTensor, axes: Axes) -> Float[Array, "*batch outputs"]:
    """x @ w of a weight that stays, in codes: decoded when x is there, and again when the gradient is. So of a layer
    one matrix at a time is there as numbers, not all from its first product to its last."""
    return x @ _decoded_beside(x, q, axes)


def _decoded_beside(x: jax.Array, q: QTensor, axes: Axes) -> jax.Array:
    x, q = jax.lax.optimization_barrier((x, q))
    return gather(q, axes, x.dtype)


def _coded_forward(x: jax.Array, q: QTensor, axes: Axes) -> tuple[jax.Array, QTensor]:
    return coded_product(x, q, axes), q


def _coded_backward(axes: Axes, q: QTensor, g: jax.Array) -> tuple[jax.Array, None]:
    return g @ _decoded_beside(g, q, axes).T, None


coded_product.defvjp(_coded_forward, _coded_backward)


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


class RMSNorm(nnx.Module):
    """x / sqrt(mean x^2) * scale (Zhang and Sennrich, arXiv:1910.07467), in float32."""

    def __init__(self, size: int, epsilon: float, axis: str | None = "norm"):
        self.scale = constant(1.0, (size,), (axis,))
        self.epsilon = epsilon

    def __call__(self, x: Float[Array, "*batch size"]) -> Float[Array, "*batch size"]:
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.epsilon)
        return (wide * fetch(self.scale, jnp.float32)).astype(x.dtype)


class LayerNorm(nnx.Module):
    """(x - mean) / deviation * scale + bias, in float32."""

    def __init__(self, size: int, epsilon: float = 1e-5):
        self.scale = constant(1.0, (size,), ("norm",))
        self.bias = constant(0.0, (size,), ("norm",))
        self.epsilon = epsilon

    def __call__(self, x: Float[Array, "*batch size"]) -> Float[Array, "*batch size"]:
        wide = x.astype(jnp.float32)
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.epsilon)
        return (wide * fetch(self.scale, jnp.float32) + fetch(self.bias, jnp.float32)).astype(x.dtype)


class Attention(nnx.Module):
    """Grouped-query attention (Ainslie et al., arXiv:2305.13245), with what the families add to it."""

    def __init__(
        self,
        rngs: nnx.Rngs,
        embed: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        causal: bool,
        window: int | None = None,
        bias: bool = False,
        output_bias: bool = False,
        qk_norm: float | None = None,  # the epsilon of a norm on each head's q and k
        implementation: str | None = None,
    ):
        self.q = Linear(rngs, embed, heads * head_dim, ("embed", "heads"), bias=bias)
        self.k = Linear(rngs, embed, kv_heads * head_dim, ("embed", "kv_heads"), bias=bias)
        self.v = Linear(rngs, embed, kv_heads * head_dim, ("embed", "kv_heads"), bias=bias)
        self.o = Linear(rngs, heads * head_dim, embed, ("heads", "embed"), bias=output_bias)
        self.q_norm = None if qk_norm is None else RMSNorm(head_dim, qk_norm, "head_dim")
        self.k_norm = None if qk_norm is None else RMSNorm(head_dim, qk_norm, "head_dim")
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.causal, self.window, self.implementation = causal, window, implementation

    def __call__(
        self,
        x: Float[Array, "batch time embed"],
        angles: Angles | None = None,
        segment_ids: Int[Array, "batch time"] | None = None,
        cache: Place | None = None,
        keys: Keys | None = None,
    ) -> tuple[Float[Array, "batch time embed"], Cache | None]:
        """The output. With a `cache`, `x` follows what is taken there, and the cache that has it too is given back."""
        inner, outer = each(keys, 2)
        q, k, v = self._projected(self._inner, x, angles, inner)
        q, k, v = (checkpoint_name(y, f"attention_{of}") for y, of in ((q, "q"), (k, "k"), (v, "v")))
        kept = None
        if cache is not None:
            mixed, kept = caches.attend(q, k, v, cache, window=self.window, implementation=self.implementation)
        else:
            mixed = self._mixed(q, k, v, segment_ids)
        joined = mixed.reshape(*x.shape[:-1], self.heads * self.head_dim)
        return self.o(constrain(joined, "batch", "time", "heads"), outer), kept

    def piecewise(
        self,
        norm: Any,
        x: Float[Array, "batch time embed"],
        angles: Angles | None,
        segment_ids: Int[Array, "batch time"] | None,
        keys: Keys | None,
        size: int | None,
        groups: int,
    ) -> Float[Array, "batch time embed"]:
        """The same of norm(x), so many heads and tokens at a time; between them only what attention needs of all."""

        inner_keys, outer = (_words(one) for one in each(keys, 2))

        def project(own: dict[str, Any], x: jax.Array, beside: Any) -> tuple[jax.Array, ...]:
            angles, words = beside
            normal = _gathered(own["norm"](x), "time")
            return tuple(y.reshape(*y.shape[:2], -1) for y in self._projected(own, normal, angles, _keys(words)))

        def attend(own: dict[str, Any], x: jax.Array, beside: Any) -> jax.Array:
            *every, segment_ids = beside
            flat = by_tokens(project, own, x, tuple(every), size=size)
            q, k, v = (y.reshape(*y.shape[:2], -1, self.head_dim) for y in flat)
            return self._mixed(q, k, v, segment_ids).reshape(flat[0].shape)

        inner = {"norm": norm, **self._inner}
        mixed = by_heads(attend, inner, x, (angles, inner_keys, segment_ids), groups, ("heads", "kv_heads"))

        def out(own: dict[str, Any], mixed: jax.Array, words: jax.Array | None) -> jax.Array:
            return _streamed(own["o"](constrain(joined(mixed), "batch", "time", "heads"), _keys(words)))

        return by_tokens(out, {"o": self.o}, mixed, outer, size=size)

    @property
    def _inner(self) -> dict[str, Any]:
        """All but the output projection."""
        own = {"q": self.q, "k": self.k, "v": self.v, "q_norm": self.q_norm, "k_norm": self.k_norm}
        return {name: module for name, module in own.items() if module is not None}

    def _projected(
        self, own: dict[str, Any], x: jax.Array, angles: Angles | None, keys: Keys | None
    ) -> tuple[jax.Array, ...]:
        """Queries, keys and values, of all heads or some."""
        of_q, of_k, of_v = each(keys, 3)
        q = self._split(own["q"](x, of_q), "heads", own.get("q_norm"), angles)
        k = self._split(own["k"](x, of_k), "kv_heads", own.get("k_norm"), angles)
        return q, k, self._split(own["v"](x, of_v), "kv_heads")

    def _mixed(self, q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
        return attention(
            q,
            spread(k),
            spread(v),
            causal=self.causal,
            window=self.window,
            segment_ids=segment_ids,
            implementation=self.implementation,
        )

    def _split(
        self,
        x: Float[Array, "batch time width"],
        axis: str,
        norm: RMSNorm | None = None,
        angles: Angles | None = None,
    ) -> Float[Array, "batch time heads head_dim"]:
        x = x.reshape(*x.shape[:-1], -1, self.head_dim)
        if norm is not None:
            x = norm(x)
        if angles is not None:
            x = rotate(x, angles)
        return constrain(x, "batch", "time", axis, "head_dim")


class GatedMlp(nnx.Module):
    """SwiGLU: down(silu(gate x) * up x) (Shazeer, arXiv:2002.05202)."""

    def __init__(self, rngs: nnx.Rngs, embed: int, mlp: int, *, bias: bool = False):
        self.hidden = mlp
        self.gate = Linear(rngs, embed, mlp, ("embed", "mlp"), bias=bias)
        self.up = Linear(rngs, embed, mlp, ("embed", "mlp"), bias=bias)
        self.down = Linear(rngs, mlp, embed, ("mlp", "embed"), bias=bias)

    def __call__(
        self, x: Float[Array, "batch time embed"], keys: Keys | None = None
    ) -> Float[Array, "batch time embed"]:
        own = each(keys, 3)
        gate, up = checkpoint_name(self.gate(x, own[0]), "mlp_gate"), checkpoint_name(self.up(x, own[1]), "mlp_up")
        hidden = checkpoint_name(jax.nn.silu(gate) * up, "mlp_hidden")
        return self.down(constrain(hidden, "batch", "mlp_time", "mlp"), own[2])


class DenseMlp(nnx.Module):
    """down(gelu(up x)), with biases."""

    def __init__(self, rngs: nnx.Rngs, embed: int, mlp: int):
        self.hidden = mlp
        self.up = Linear(rngs, embed, mlp, ("embed", "mlp"), bias=True)
        self.down = Linear(rngs, mlp, embed, ("mlp", "embed"), bias=True)

    def __call__(self, x: Float[Array, "*batch embed"], keys: Keys | None = None) -> Float[Array, "*batch embed"]:
        own = each(keys, 2)
        hidden = checkpoint_name(jax.nn.gelu(checkpoint_name(self.up(x, own[0]), "mlp_up")), "mlp_hidden")
        return self.down(constrain(hidden, *("batch", "mlp_time")[: x.ndim - 1], "mlp"), own[1])


class Block(nnx.Module):
    """Pre-norm residual block: attention, then an MLP."""

    def __init__(
        self, attention: Attention, mlp: GatedMlp | DenseMlp, norms: tuple[Any, Any], dropout: float, long: Long
    ):
        self.attention_norm, self.mlp_norm = norms
        self.attention, self.mlp, self.dropout, self.long = attention, mlp, dropout, long

    def __call__(
        self,
        x: Float[Array, "batch time embed"],
        angles: Angles | None = None,
        segment_ids: Int[Array, "batch time"] | None = None,
        keys: RowKeys | None = None,
        cache: Place | None = None,
    ) -> tuple[Float[Array, "batch time embed"], Cache | None]:
        first, second, third, fourth = (None,) * 4 if keys is None else self._token_keys(keys, x.shape[1])
        mixed, kept = self._attended(x, angles, segment_ids, cache, third)
        x = x + dropout(checkpoint_name(mixed, "attention_out"), self.dropout, first)
        size = tokens_at_once(self.long.chunk, x, self.mlp.hidden)
        made = by_tokens(_fed, {"norm": self.mlp_norm, "mlp": self.mlp}, x, _words(fourth), size=size)
        made = checkpoint_name(made, "mlp_out")
        x = x + dropout(made, self.dropout, second)
        return _streamed(x), kept

    def _attended(
        self,
        x: jax.Array,
        angles: Angles | None,
        segment_ids: jax.Array | None,
        cache: Place | None,
        keys: Keys | None,
    ) -> tuple[jax.Array, Cache | None]:
        own = self.attention
        heads = own.heads, own.kv_heads, own.head_dim
        size, groups = tokens_at_once(self.long.chunk, x, self.mlp.hidden), groups_of_heads(self.long.groups, x, *heads)
        if cache is None and (size is not None or groups > 1):
            return own.piecewise(self.attention_norm, x, angles, segment_ids, keys, size, groups), None
        normal = checkpoint_name(self.attention_norm(x), "attention_norm")
        mixed, kept = own(_gathered(normal, "time"), angles, segment_ids, cache, keys)
        return _streamed(mixed), kept

    def _token_keys(self, keys: RowKeys, length: int) -> tuple[Keys, ...]:
        """For each token and place in the block (both residual branches, attention, MLP), by its position: a time
        split over `context` lies in another order."""
        order = places(current(), length, self.attention.window)
        order = np.arange(length, dtype=np.int32) if order is None else order
        of_row = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
        return tuple(jax.vmap(of_row, in_axes=(0, None))(half, jnp.asarray(order)) for half in several(keys, 4))


def _fed(own: dict[str, Any], x: Float[Array, "batch time embed"], words: Any) -> Float[Array, "batch time embed"]:
    """norm, then MLP."""
    normal = checkpoint_name(own["norm"](x), "mlp_norm")
    return _streamed(own["mlp"](_gathered(normal, "mlp_time"), _keys(words)))


def _words(keys: Keys | None) -> jax.Array | None:
    """Keys as numbers, which are cut as other arrays of tokens are."""
    return None if keys is None else jax.random.key_data(keys)


def _keys(words: jax.Array | None) -> Keys | None:
    return None if words is None else jax.random.wrap_key_data(words)


def _streamed(x: Float[Array, "batch time embed"]) -> Float[Array, "batch time embed"]:
    """Partial sums over `tensor` become parts of the time: a reduce-scatter."""
    return constrain(x, "batch", "stream", "embed")


def _gathered(x: Float[Array, "batch time embed"], time: str) -> Float[Array, "batch time embed"]:
    """Each device of `tensor` sees the time whole: an all-gather, and a reduce-scatter of the gradient. Not of the time
    beside weights that `tensor` does not split."""
    return constrain(_streamed(x), "batch", time, "embed")


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
