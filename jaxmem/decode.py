"""Continue a text with what was trained.

A prompt is run once and leaves its keys and values; each further token reads them and adds its own. For L layers
of `kv_heads` heads the cache takes 2 * L * length * kv_heads * head_dim numbers; activations are those of one layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxmem.errors import UserError
from jaxmem.program import Program


def generate(
    program: Program,
    params: Any,
    prompt: np.ndarray,
    count: int,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    end: int | None = None,
) -> Iterator[int]:
    """Up to `count` tokens after the prompt, one by one; stops after `end`. Temperature 0 takes the likeliest."""
    if program.cfg.model.family != "decoder":
        raise UserError(f"model.family: {program.cfg.model.family} makes no text; generate needs a decoder")
    if not len(prompt):
        raise UserError("prompt: it is empty; give at least one token to start from")
    if count < 1:
        raise UserError(f"tokens: {count} is none; ask for at least 1")
    if not temperature >= 0.0:
        raise UserError(f"temperature: {temperature} is not at least 0; 0 takes the likeliest token")
    size = len(prompt) + count

    def pick(logits: jax.Array, key: jax.Array) -> jax.Array:
        logits = logits.astype(jnp.float32)
        if temperature == 0.0:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return jax.random.categorical(key, logits / temperature).astype(jnp.int32)

    @jax.jit
    def start(params: Any, tokens: jax.Array, key: jax.Array) -> tuple[jax.Array, Any]:
        logits, cache = nnx.merge(program.graphdef, params).prefill(tokens)
        room = [(0, 0), (0, 0), (0, size - tokens.shape[1]), (0, 0), (0, 0)]  # [layer, batch, time, heads, head_dim]
        return pick(logits, key), jax.tree.map(lambda kept: jnp.pad(kept, room), cache)

    @jax.jit(donate_argnums=2)
    def follow(params: Any, token: jax.Array, cache: Any, length: jax.Array, key: jax.Array) -> tuple[jax.Array, Any]:
        logits, cache = nnx.merge(program.graphdef, params).extend(token[:, None], cache, length)
        return pick(logits, jax.random.fold_in(key, length)), cache

    key = jax.random.key(seed)
    with program.layout.one_row():
        token, cache = start(params, jnp.asarray(prompt, jnp.int32)[None], key)
        for length in range(len(prompt), size):
            yield int(token[0])
            if int(token[0]) == end or length == size - 1:
                return
            token, cache = follow(params, token, cache, jnp.asarray(length, jnp.int32), key)
