"""A transformer's residual block: attention, then an MLP, whole or so many tokens and heads at a time.

Between the two halves of a block split over `tensor` the time is split too (sequence parallelism: Korthikanti et al.,
arXiv:2205.05198): a gather before each half's first products, a reduce-scatter after its last.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jaxmem.models import cache as caches
from jaxmem.models.cache import Cache, Place
from jaxmem.models.chunks import Long, by_heads, by_tokens, groups_of_heads, joined, tokens_at_once
from jaxmem.models.exchange import attention, places, spread
from jaxmem.models.parts import Keys, Linear, RMSNorm, RowKeys, dropout, each, several
from jaxmem.models.rope import Angles, rotate
from jaxmem.sharding import constrain, current, row_major_in_stages
from jaxmem.stack import recompute_from_inputs


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
        deterministic: bool = False,
    ):
        self.q = Linear(rngs, embed, heads * head_dim, ("embed", "heads"), bias=bias)
        self.k = Linear(rngs, embed, kv_heads * head_dim, ("embed", "kv_heads"), bias=bias)
        self.v = Linear(rngs, embed, kv_heads * head_dim, ("embed", "kv_heads"), bias=bias)
        self.o = Linear(rngs, heads * head_dim, embed, ("heads", "embed"), bias=output_bias)
        self.q_norm = None if qk_norm is None else RMSNorm(head_dim, qk_norm, "head_dim")
        self.k_norm = None if qk_norm is None else RMSNorm(head_dim, qk_norm, "head_dim")
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.causal, self.window, self.implementation = causal, window, implementation
        self.deterministic = deterministic

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
            return self._mixed(q, k, v, segment_ids)

        inner = {"norm": norm, **self._inner}
        mixed = by_heads(attend, inner, x, (angles, inner_keys, segment_ids), groups, ("heads", "kv_heads"))
        mixed = mixed.reshape(*mixed.shape[:-2], -1)

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
            deterministic=self.deterministic,
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
        hidden = recompute_from_inputs(lambda gate, up: jax.nn.silu(gate) * up, gate, up)
        hidden = constrain(checkpoint_name(hidden, "mlp_hidden"), "batch", "mlp_time", "mlp")
        return self.down(hidden, own[2])


class DenseMlp(nnx.Module):
    """down(gelu(up x)), with biases."""

    def __init__(self, rngs: nnx.Rngs, embed: int, mlp: int):
        self.hidden = mlp
        self.up = Linear(rngs, embed, mlp, ("embed", "mlp"), bias=True)
        self.down = Linear(rngs, mlp, embed, ("mlp", "embed"), bias=True)

    def __call__(self, x: Float[Array, "*batch embed"], keys: Keys | None = None) -> Float[Array, "*batch embed"]:
        own = each(keys, 2)
        up = checkpoint_name(self.up(x, own[0]), "mlp_up")
        hidden = checkpoint_name(recompute_from_inputs(jax.nn.gelu, up), "mlp_hidden")
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
        x = row_major_in_stages(x, "batch", "stream", "embed")
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
