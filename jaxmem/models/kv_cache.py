"""The KV cache: keys and values of every layer for the tokens read so far, with capacity for more.

For L layers, R texts and a capacity of T tokens it has 2 L R T kv_heads head_dim elements, sharded over heads. In
bfloat16 a head takes 2 head_dim bytes per token; in int8, with a scale per head and token, head_dim + 4 (Hooper et al.,
arXiv:2401.18079, use fewer bits). Rounding to int8 changes an element by at most 1 / 254 of the absmax of its head.
Keys with biases (Qwen2) are not quantized: if a few dimensions have biases of hundreds, the others would be rounded to
0. New keys and values are written in place. In addition to the cache, the keys and values of one layer exist in the
compute dtype.
"""

from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxmem import kernels
from jaxmem.config.networks import Decoder
from jaxmem.quant import QTensor, quantize, values_of
from jaxmem.sharding.arrays import constrain
from jaxmem.typing import Tree

NewTokens = Float[Array, "batch time kv_heads head_dim"]
Buffer: TypeAlias = Float[Array, "layer batch capacity kv_heads head_dim"] | QTensor
KVCache = tuple[Buffer, Buffer]  # keys and values

AXES = ("layer", "batch", None, "kv_heads", "head_dim")


@dataclass(frozen=True)
class CacheSlot:
    """The position in the cache at which a layer reads earlier tokens and writes new ones."""

    cache: KVCache
    layer: Int[Array, ""]
    length: Int[Array, ""]  # tokens in the cache
    first: Int[Array, "batch"] | None  # the index of the first token of each text that is not padding; None: 0

    def attend(
        self, q: Float[Array, "batch time heads head_dim"], k: NewTokens, v: NewTokens, options: dict[str, Any]
    ) -> tuple[Float[Array, "batch time heads head_dim"], KVCache]:
        """Attention of new tokens to the tokens in the cache and to earlier new tokens. Also returns the updated cache.
        `options`: the options of `kernels.attention`."""
        # The cache is written before it is read; in the other order XLA copies the caches of all layers.
        cache = self._write(self.cache[0], k), self._write(self.cache[1], v)
        new = q.shape[1]
        capacity = capacity_of(cache)
        places = jnp.arange(capacity, dtype=jnp.int32)
        end = self.length + new
        if new > 1:  # rotated so that the last token is last, as a causal mask expects
            places = (places + end) % capacity
        visible = places < end
        if new == 1 and (window := options["window"]) is not None:
            unlimited = jnp.logical_not(options.get("has_window", True))
            visible &= (places >= end - window) | unlimited
            options = options | {"window": None, "has_window": None}
        visible = visible[None] if self.first is None else visible & (places >= self.first[:, None])

        def read(buffer: Buffer) -> jax.Array:
            values = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, self.layer, keepdims=False), buffer)
            if new > 1:
                values = jax.tree.map(lambda x: jnp.take(x, places, axis=1), values)
            return values_of(values, q.dtype)

        mixed = kernels.attention(
            q,
            *map(read, cache),
            causal=new > 1,
            segment_ids=jnp.ones(q.shape[:2], jnp.int32),
            kv_segment_ids=jnp.broadcast_to(visible.astype(jnp.int32), (q.shape[0], capacity)),
            **options,
        )
        return mixed, cache

    def _write(self, buffer: Buffer, new: NewTokens) -> Buffer:
        values: Tree = buffer.requantize(new) if isinstance(buffer, QTensor) else new.astype(buffer.dtype)
        start = (self.layer, 0, self.length, 0, 0)
        return _constrain(jax.tree.map(lambda x, y: jax.lax.dynamic_update_slice(x, y[None], start), buffer, values))


def empty_cache(cfg: Decoder, rows: int, capacity: int, dtype: np.dtype, storage: str = "full") -> KVCache:
    """A cache of zeros. `storage`: `full` (in `dtype`) or `int8`, which keys with biases are not stored in."""
    full = jax.ShapeDtypeStruct((cfg.layers, rows, capacity, cfg.kv_heads, cfg.head_dim), dtype)

    def zeros(form: str) -> Buffer:
        values: Tree = full if form == "full" else jax.eval_shape(lambda x: quantize(x, form, None), full)
        return _constrain(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), values))

    return zeros("full" if cfg.attention_bias else storage), zeros(storage)


def grow(cache: KVCache, length: int) -> Tree:
    """The cache with capacity for `length` more tokens. Both caches exist during the copy."""
    return jax.tree.map(lambda x: jnp.pad(x, [(0, length if d == 2 else 0) for d in range(x.ndim)]), cache)


def capacity_of(cache: KVCache) -> int:
    """Tokens that the cache can hold."""
    return int(jax.tree.leaves(cache)[0].shape[2])


def _constrain(buffer: Buffer) -> Buffer:
    return jax.tree.map(lambda x: constrain(x, *AXES), buffer)
