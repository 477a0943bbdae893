"""Attention by its definition, with all scores at once: its time and memory grow with queries x keys. Tests compare all
other implementations with it."""

import jax
import jax.numpy as jnp

from jaxmem.kernels.scopes import purpose

from .arguments import Extras, KeyHeads, LogSumExp, Options, QueryHeads, visible


@purpose("all_scores")
def attend(q: QueryHeads, k: KeyHeads, v: KeyHeads, options: Options, extras: Extras) -> tuple[QueryHeads, LogSumExp]:
    """Output and log-sum-exp, computed in float32, or in float64 for float64 inputs; zeros and -inf for a row without
    keys."""
    wide = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
    batch, queries, heads, dim = q.shape
    keys, kv_heads = k.shape[1:3]
    grouped = q.astype(wide).reshape(batch, queries, kv_heads, heads // kv_heads, dim)
    s = jnp.einsum("bqngd,bknd->bngqk", grouped, k.astype(wide)) * options.scale
    if options.soft_cap is not None:
        s = options.soft_cap * jnp.tanh(s / options.soft_cap)
    query = jnp.arange(queries, dtype=jnp.int32)[:, None]
    key = jnp.arange(keys, dtype=jnp.int32)
    seen = visible(query, key, offset=keys - queries, causal=options.causal, window=options.window)
    if seen is not None:
        s = jnp.where(seen, s, -jnp.inf)
    if extras.segment_ids is not None and extras.kv_segment_ids is not None:
        same = extras.segment_ids[:, :, None] == extras.kv_segment_ids[:, None, :]
        s = jnp.where(same[:, None, None], s, -jnp.inf)
    top = jax.lax.stop_gradient(jnp.max(s, axis=-1, keepdims=True))
    p = jnp.exp(s - jnp.where(jnp.isneginf(top), 0.0, top))
    total = jnp.sum(p, axis=-1, keepdims=True)
    seen_any = total > 0.0
    total = jnp.where(seen_any, total, 1.0)
    lse = jnp.where(seen_any, top + jnp.log(total), -jnp.inf)[..., 0].reshape(batch, heads, queries)
    p = p / total
    out = jnp.einsum("bngqk,bknd->bqngd", p, v.astype(wide))
    return out.astype(q.dtype).reshape(q.shape), lse
