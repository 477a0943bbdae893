"""The residual block of a transformer: attention and an MLP, at once or in chunks of tokens and groups of heads.

With `mesh.tensor`, activations between attention and MLP are sharded over the sequence dimension (sequence parallelism:
Korthikanti et al., arXiv:2205.05198): an all-gather before their first matmuls, a reduce-scatter after the last.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from jaxmem.models.attention import Attention, Tokens, as_keys, context_order, gather_time, key_data, scatter_time
from jaxmem.models.chunking import map_token_chunks
from jaxmem.models.layers import Features, Keys, Modules, RowKeys, dropout, fold_keys, split_keys
from jaxmem.models.linear import Linear, apply_linears
from jaxmem.sharding.arrays import constrain, row_major_in_stages
from jaxmem.sharding.layout import current
from jaxmem.stack.remat import recompute_from_inputs, saved_as


def _swiglu_clamped(gate: jax.Array, up: jax.Array) -> jax.Array:
    """SwiGLU as in gpt-oss: clamped at 7, a steeper sigmoid, and a hidden unit of 1 for up = 0."""
    gate = jnp.minimum(gate, 7.0)
    up = jnp.clip(up, -7.0, 7.0)
    return gate * jax.nn.sigmoid(1.702 * gate) * (up + 1.0)


# (gate, up) -> hidden units
GATES: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "silu": lambda gate, up: jax.nn.silu(gate) * up,
    "gelu_tanh": lambda gate, up: jax.nn.gelu(gate, approximate=True) * up,
    "swiglu_clamped": _swiglu_clamped,
}


class GatedMlp(nnx.Module):
    """SwiGLU: down(silu(gate x) * up x), or with another activation (Shazeer, arXiv:2002.05202)."""

    def __init__(self, rngs: nnx.Rngs, embed: int, mlp: int, *, bias: bool = False, activation: str = "silu"):
        self.hidden = mlp
        self.activation = activation
        self.gate = Linear(rngs, embed, mlp, ("embed", "mlp"), bias=bias)
        self.up = Linear(rngs, embed, mlp, ("embed", "mlp"), bias=bias)
        self.down = Linear(rngs, mlp, embed, ("mlp", "embed"), bias=bias)

    def __call__(self, x: Features, keys: Keys | None = None) -> Features:
        *inner_keys, outer_keys = fold_keys(keys, 3)
        gate, up = apply_linears(x, (self.gate, self.up), inner_keys)
        hidden = recompute_from_inputs(GATES[self.activation], saved_as(gate, "mlp_gate"), saved_as(up, "mlp_up"))
        hidden = constrain(saved_as(hidden, "mlp_hidden"), "batch", "mlp_time", "mlp")
        return self.down(hidden, outer_keys)


class DenseMlp(nnx.Module):
    """down(gelu(up x)), with biases."""

    def __init__(self, rngs: nnx.Rngs, embed: int, mlp: int):
        self.hidden = mlp
        self.up = Linear(rngs, embed, mlp, ("embed", "mlp"), bias=True)
        self.down = Linear(rngs, mlp, embed, ("mlp", "embed"), bias=True)

    def __call__(self, x: Float[Array, "*batch embed"], keys: Keys | None = None) -> Float[Array, "*batch embed"]:
        matrix_keys = fold_keys(keys, 2)
        up = saved_as(self.up(x, matrix_keys[0]), "mlp_up")
        hidden = saved_as(recompute_from_inputs(jax.nn.gelu, up), "mlp_hidden")
        return self.down(constrain(hidden, *("batch", "mlp_time")[: x.ndim - 1], "mlp"), matrix_keys[1])


class Block(nnx.Module):
    """Residual block: attention, then an MLP. `norms` and `post_norms` are the norms before and after each; None: no
    norm there."""

    def __init__(
        self,
        attention: Attention,
        mlp: Any,  # GatedMlp, DenseMlp or Experts
        norms: tuple[Any, Any],
        dropout: float,
        post_norms: tuple[Any, Any] = (None, None),
    ):
        self.attention_norm, self.mlp_norm = norms
        self.attention_post_norm, self.mlp_post_norm = post_norms
        self.attention = attention
        self.mlp = mlp
        self.dropout = dropout

    def __call__(
        self, x: Features, tokens: Tokens = Tokens(), keys: RowKeys | None = None, slot: Any = None
    ) -> tuple[Features, Any, jax.Array | None]:
        """Also returns the updated cache if there is a `slot` of a KV cache (see `Attention`), and the statistics of
        the router if the MLP is a mixture of experts."""
        x = row_major_in_stages(x, "batch", "stream", "embed")
        first, second, third, fourth = (None,) * 4 if keys is None else self._token_keys(keys, x.shape[1])
        size = self.attention.execution.chunking.chunk_size(x, self.mlp.hidden or 0)
        mixed, cache = self._attend(x, tokens, third, slot, size)
        mixed = _apply_norm(self.attention_post_norm, saved_as(mixed, "attention_out"))
        x = x + dropout(mixed, self.dropout, first)
        mlp = {"mlp": self.mlp} if self.mlp_norm is None else {"norm": self.mlp_norm, "mlp": self.mlp}
        size = size if self.mlp.hidden else None
        others = key_data(fourth), None if self.mlp.hidden else tokens.segment_ids  # only routers read segments
        y, router = map_token_chunks(_normed_mlp, mlp, x, others, size=size)
        y = _apply_norm(self.mlp_post_norm, saved_as(y, "mlp_out"))
        return scatter_time(x + dropout(y, self.dropout, second)), cache, router

    def _attend(
        self, x: Features, tokens: Tokens, keys: Keys | None, slot: Any, size: int | None
    ) -> tuple[Features, Any]:
        groups = self.attention.group_count(x)
        if slot is None and (size is not None or groups > 1):
            return self.attention.in_chunks(self.attention_norm, x, tokens, keys, size, groups), None
        normal = _apply_norm(self.attention_norm, x, "attention_norm")
        mixed, cache = self.attention(gather_time(normal, "time"), tokens, keys, slot)
        return scatter_time(mixed), cache

    def _token_keys(self, keys: RowKeys, length: int) -> tuple[Keys, ...]:
        """Dropout keys [batch, time] for both residual branches and the adapters of attention and MLP. They depend on
        the position of a token, since a sequence sharded over `context` is stored in another order."""
        attention = self.attention
        order = context_order(current(), length, attention.execution.context_method, attention.spec.window)
        order = np.arange(length, dtype=np.int32) if order is None else order
        of_row = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
        return tuple(
            jax.vmap(of_row, in_axes=(0, None))(part_keys, jnp.asarray(order)) for part_keys in split_keys(keys, 4)
        )


def _apply_norm(norm: Any, x: jax.Array, name: str | None = None) -> jax.Array:
    """The result of a norm, named `name` for activation checkpointing; x if there is no norm."""
    if norm is None:
        return x
    return norm(x) if name is None else saved_as(norm(x), name)


def _normed_mlp(modules: Modules, x: Features, others: tuple[Any, Any]) -> tuple[Features, jax.Array | None]:
    normal = _apply_norm(modules.get("norm"), x, "mlp_norm")
    data, segment_ids = others
    segments = () if segment_ids is None else (segment_ids,)
    y = modules["mlp"](gather_time(normal, "mlp_time"), as_keys(data), *segments)
    y, router = y if isinstance(y, tuple) else (y, None)
    return scatter_time(y), router
