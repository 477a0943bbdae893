"""The programs of the Pallas kernels: what one block of queries, or of keys, does. `pallas.py` calls them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from .block import (
    Beside,
    Call,
    bent,
    dot,
    in_sight,
    kept_share,
    load,
    load_row,
    positions,
    power,
    row_number,
    store,
    turned_block,
)
from .visits import of_keys, of_queries, over


def forward(call: Call, q_ref: Any, k_ref: Any, v_ref: Any, beside: Beside, out_ref: Any, lse_ref: Any) -> None:
    block, row = turned_block(), row_number()
    first = block * call.blocks.queries
    at = positions(first, call.blocks.queries)
    q = load(q_ref, (slice(None),), at < call.queries, call)
    mine = None if beside.ids is None else load_row(beside.ids, first, at, call.queries)

    def visit(j: jax.Array, state: Any, *, masked: bool) -> Any:
        out, top, total = state
        at_key = positions(j * call.blocks.keys, call.blocks.keys)
        here = pl.ds(j * call.blocks.keys, call.blocks.keys)
        k = load(k_ref, (here,), at_key < call.keys, call)
        s, _ = bent(call, dot(q, k, trans_b=True))
        if masked:
            theirs = None if beside.kv_ids is None else load_row(beside.kv_ids, None, at_key, call.keys, here)
            s = jnp.where(in_sight(call, at[:, None], at_key[None, :], mine, theirs, (1, 0)), s, -jnp.inf)
        higher = jnp.maximum(top, jnp.max(s, axis=1))
        # Until a row has seen a key its maximum is -inf, and a difference of two of them no number.
        level = jnp.where(higher == -jnp.inf, 0.0, higher)
        p = power(call, s - level[:, None])
        shrink = power(call, top - level)
        total = total * shrink + jnp.sum(p, axis=1)
        if beside.seed is not None:
            p = p * kept_share(call, beside.seed, row, at[:, None], at_key[None, :])
        v = load(v_ref, (here,), at_key < call.keys, call)
        return out * shrink[:, None] + dot(p.astype(v.dtype), v), higher, total

    rows = call.blocks.queries
    start = (
        jnp.zeros((rows, call.wide), jnp.float32),
        jnp.full((rows,), -jnp.inf, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
    )
    out, top, total = over(of_keys(call, block, beside), visit, start)
    seen = total > 0
    out = out / jnp.where(seen, total, 1.0)[:, None]
    lse = jnp.where(seen, top * call.unit + jnp.log(jnp.where(seen, total, 1.0)), -jnp.inf)
    store(out_ref, out, at < call.queries, call)
    plgpu.store(lse_ref, lse, mask=at < call.queries)


def d_queries(
    call: Call,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    d_out_ref: Any,
    lse_ref: Any,
    inner_ref: Any,
    beside: Beside,
    dq_ref: Any,
) -> None:
    block, row = turned_block(), row_number()
    first = block * call.blocks.queries
    at = positions(first, call.blocks.queries)
    real = at < call.queries
    q, d_out = load(q_ref, (slice(None),), real, call), load(d_out_ref, (slice(None),), real, call)
    lse, inner = (plgpu.load(ref, mask=real, other=0.0)[:, None] for ref in (lse_ref, inner_ref))
    mine = None if beside.ids is None else load_row(beside.ids, first, at, call.queries)

    def visit(j: jax.Array, dq: jax.Array, *, masked: bool) -> jax.Array:
        at_key = positions(j * call.blocks.keys, call.blocks.keys)
        here = pl.ds(j * call.blocks.keys, call.blocks.keys)
        k, v = (load(ref, (here,), at_key < call.keys, call) for ref in (k_ref, v_ref))
        s, slope = bent(call, dot(q, k, trans_b=True))
        if masked:
            theirs = None if beside.kv_ids is None else load_row(beside.kv_ids, None, at_key, call.keys, here)
            s = jnp.where(in_sight(call, at[:, None], at_key[None, :], mine, theirs, (1, 0)), s, -jnp.inf)
        p = power(call, s - lse)
        dp = dot(d_out, v, trans_b=True)
        if beside.seed is not None:
            dp = dp * kept_share(call, beside.seed, row, at[:, None], at_key[None, :])
        ds = p * (dp - inner)
        ds = ds if slope is None else ds * slope
        return dq + dot(ds.astype(k.dtype), k)

    dq = over(of_keys(call, block, beside), visit, jnp.zeros((call.blocks.queries, call.wide), jnp.float32))
    store(dq_ref, dq * call.options.scale, real, call)


def d_keys(
    call: Call,
    groups: int,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    d_out_ref: Any,
    lse_ref: Any,
    inner_ref: Any,
    beside: Beside,
    dk_ref: Any,
    dv_ref: Any,
) -> None:
    block, head = pl.program_id(0), row_number() * groups
    first = block * call.blocks.keys
    at_key = positions(first, call.blocks.keys)
    real = at_key < call.keys
    k, v = load(k_ref, (slice(None),), real, call), load(v_ref, (slice(None),), real, call)
    theirs = None if beside.kv_ids is None else load_row(beside.kv_ids, first, at_key, call.keys)

    def of_head(g: jax.Array, state: Any) -> Any:
        def visit(i: jax.Array, state: Any, *, masked: bool) -> Any:
            # Transposed, keys by queries: both products below read p and ds as they lie. Rows beyond the last query
            # are zeros in q and d_out and add nothing.
            dk, dv = state
            at = positions(i * call.blocks.queries, call.blocks.queries)
            here = pl.ds(i * call.blocks.queries, call.blocks.queries)
            q, d_out = (load(ref, (here, g), at < call.queries, call) for ref in (q_ref, d_out_ref))
            lse, inner = (
                plgpu.load(ref.at[g, here], mask=at < call.queries, other=0.0)[None, :] for ref in (lse_ref, inner_ref)
            )
            s, slope = bent(call, dot(k, q, trans_b=True))
            if masked:
                mine = None if beside.ids is None else load_row(beside.ids, None, at, call.queries, here)
                s = jnp.where(in_sight(call, at[None, :], at_key[:, None], mine, theirs, (0, 1)), s, -jnp.inf)
            p = power(call, s - lse)
            dp = dot(v, d_out, trans_b=True)
            shared = p
            if beside.seed is not None:
                share = kept_share(call, beside.seed, head + g, at[None, :], at_key[:, None])
                shared, dp = p * share, dp * share
            ds = p * (dp - inner)
            ds = ds if slope is None else ds * slope
            return dk + dot(ds.astype(q.dtype), q), dv + dot(shared.astype(d_out.dtype), d_out)

        return over(of_queries(call, block, beside), visit, state)

    zeros = jnp.zeros((call.blocks.keys, call.wide), jnp.float32)
    dk, dv = jax.lax.fori_loop(0, groups, of_head, (zeros, zeros))
    store(dk_ref, dk * call.options.scale, real, call)
    store(dv_ref, dv, real, call)
