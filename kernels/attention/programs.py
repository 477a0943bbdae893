"""The programs of the Pallas kernels: what one block of queries, or of keys, does. `pallas.py` calls them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from .arguments import Options
from .mask import kept, visible
from .shapes import pairs

LOG2E = math.log2(math.e)


class Blocks(NamedTuple):
    """How a kernel is cut: powers of two, at least 16 for the tensor cores."""

    queries: int
    keys: int
    warps: int
    stages: int


class Call(NamedTuple):
    """All that is known of a call when its kernels are compiled."""

    options: Options
    queries: int
    keys: int
    dim: int
    blocks: Blocks

    @property
    def offset(self) -> int:
        return self.keys - self.queries

    @property
    def pairs(self) -> int:
        """(query, key) pairs that see each other, segments aside."""
        return pairs(self.queries, self.keys, causal=self.options.causal, window=self.options.window)

    @property
    def wide(self) -> int:
        """`dim` as a block holds it."""
        return pl.next_power_of_2(self.dim)

    @property
    def unit(self) -> float:
        """What a score of 1, as `_bent` gives it, is in natural units."""
        o = self.options
        return o.soft_cap or (o.scale if _is_unit(o.scale) else 1.0)


class Beside(NamedTuple):
    """What a kernel reads beside q, k and v: arrays outside, references inside."""

    seed: Any = None
    ids: Any = None
    kv_ids: Any = None
    begin: Any = None  # of each of this kernel's blocks: the first block of the others that shares a segment with it
    end: Any = None


def forward(call: Call, q_ref: Any, k_ref: Any, v_ref: Any, beside: Beside, out_ref: Any, lse_ref: Any) -> None:
    block, row = _turned(), _row()
    first = block * call.blocks.queries
    at = _at(first, call.blocks.queries)
    q = _load(q_ref, (slice(None),), at < call.queries, call)
    mine = None if beside.ids is None else _load_row(beside.ids, first, at, call.queries)

    def visit(j: jax.Array, state: Any, *, masked: bool) -> Any:
        out, top, total = state
        at_key = _at(j * call.blocks.keys, call.blocks.keys)
        here = pl.ds(j * call.blocks.keys, call.blocks.keys)
        k = _load(k_ref, (here,), at_key < call.keys, call)
        s, _ = _bent(call, _dot(q, k, trans_b=True))
        if masked:
            theirs = None if beside.kv_ids is None else _load_row(beside.kv_ids, None, at_key, call.keys, here)
            s = jnp.where(_seen(call, at[:, None], at_key[None, :], mine, theirs, (1, 0)), s, -jnp.inf)
        higher = jnp.maximum(top, jnp.max(s, axis=1))
        # Until a row has seen a key its maximum is -inf, and a difference of two of them no number.
        level = jnp.where(higher == -jnp.inf, 0.0, higher)
        p = _power(call, s - level[:, None])
        shrink = _power(call, top - level)
        total = total * shrink + jnp.sum(p, axis=1)
        if beside.seed is not None:
            p = p * _share(call, beside.seed, row, at[:, None], at_key[None, :])
        v = _load(v_ref, (here,), at_key < call.keys, call)
        return out * shrink[:, None] + _dot(p.astype(v.dtype), v), higher, total

    rows = call.blocks.queries
    start = (
        jnp.zeros((rows, call.wide), jnp.float32),
        jnp.full((rows,), -jnp.inf, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
    )
    out, top, total = _over_keys(call, block, beside, visit, start)
    seen = total > 0
    out = out / jnp.where(seen, total, 1.0)[:, None]
    lse = jnp.where(seen, top * call.unit + jnp.log(jnp.where(seen, total, 1.0)), -jnp.inf)
    _store(out_ref, out, at < call.queries, call)
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
    block, row = _turned(), _row()
    first = block * call.blocks.queries
    at = _at(first, call.blocks.queries)
    real = at < call.queries
    q, d_out = _load(q_ref, (slice(None),), real, call), _load(d_out_ref, (slice(None),), real, call)
    lse, inner = (plgpu.load(ref, mask=real, other=0.0)[:, None] for ref in (lse_ref, inner_ref))
    mine = None if beside.ids is None else _load_row(beside.ids, first, at, call.queries)

    def visit(j: jax.Array, dq: jax.Array, *, masked: bool) -> jax.Array:
        at_key = _at(j * call.blocks.keys, call.blocks.keys)
        here = pl.ds(j * call.blocks.keys, call.blocks.keys)
        k, v = (_load(ref, (here,), at_key < call.keys, call) for ref in (k_ref, v_ref))
        s, slope = _bent(call, _dot(q, k, trans_b=True))
        if masked:
            theirs = None if beside.kv_ids is None else _load_row(beside.kv_ids, None, at_key, call.keys, here)
            s = jnp.where(_seen(call, at[:, None], at_key[None, :], mine, theirs, (1, 0)), s, -jnp.inf)
        p = _power(call, s - lse)
        dp = _dot(d_out, v, trans_b=True)
        if beside.seed is not None:
            dp = dp * _share(call, beside.seed, row, at[:, None], at_key[None, :])
        ds = p * (dp - inner)
        ds = ds if slope is None else ds * slope
        return dq + _dot(ds.astype(k.dtype), k)

    dq = _over_keys(call, block, beside, visit, jnp.zeros((call.blocks.queries, call.wide), jnp.float32))
    _store(dq_ref, dq * call.options.scale, real, call)


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
    block, head = pl.program_id(0), _row() * groups
    first = block * call.blocks.keys
    at_key = _at(first, call.blocks.keys)
    real = at_key < call.keys
    k, v = _load(k_ref, (slice(None),), real, call), _load(v_ref, (slice(None),), real, call)
    theirs = None if beside.kv_ids is None else _load_row(beside.kv_ids, first, at_key, call.keys)

    def of_head(g: jax.Array, state: Any) -> Any:
        def visit(i: jax.Array, state: Any, *, masked: bool) -> Any:
            # Transposed, keys by queries: both products below read p and ds as they lie. Rows beyond the last query
            # are zeros in q and d_out and add nothing.
            dk, dv = state
            at = _at(i * call.blocks.queries, call.blocks.queries)
            here = pl.ds(i * call.blocks.queries, call.blocks.queries)
            q, d_out = (_load(ref, (here, g), at < call.queries, call) for ref in (q_ref, d_out_ref))
            lse, inner = (
                plgpu.load(ref.at[g, here], mask=at < call.queries, other=0.0)[None, :] for ref in (lse_ref, inner_ref)
            )
            s, slope = _bent(call, _dot(k, q, trans_b=True))
            if masked:
                mine = None if beside.ids is None else _load_row(beside.ids, None, at, call.queries, here)
                s = jnp.where(_seen(call, at[None, :], at_key[:, None], mine, theirs, (0, 1)), s, -jnp.inf)
            p = _power(call, s - lse)
            dp = _dot(v, d_out, trans_b=True)
            shared = p
            if beside.seed is not None:
                share = _share(call, beside.seed, head + g, at[None, :], at_key[:, None])
                shared, dp = p * share, dp * share
            ds = p * (dp - inner)
            ds = ds if slope is None else ds * slope
            return dk + _dot(ds.astype(q.dtype), q), dv + _dot(shared.astype(d_out.dtype), d_out)

        return _over_queries(call, block, beside, visit, state)

    zeros = jnp.zeros((call.blocks.keys, call.wide), jnp.float32)
    dk, dv = jax.lax.fori_loop(0, groups, of_head, (zeros, zeros))
    _store(dk_ref, dk * call.options.scale, real, call)
    _store(dv_ref, dv, real, call)


# ---------------------------------------------------------------- which blocks are visited


def _over_keys(call: Call, block: jax.Array, beside: Beside, visit: Callable[..., Any], state: Any) -> Any:
    """`visit` each block of keys in which this block of queries sees something."""
    o, size = call.options, call.blocks.keys
    first = block * call.blocks.queries
    last = first + call.blocks.queries - 1
    low: Any = jnp.int32(0)
    high: Any = jnp.int32(call.keys)
    whole_low: Any = jnp.int32(0)
    whole_high: Any = jnp.int32(call.keys)
    if o.causal or o.window is not None:
        high = jnp.clip(last + call.offset + 1, 0, call.keys)
        whole_high = jnp.clip(first + call.offset + 1, 0, call.keys)
    if o.window is not None:
        low = jnp.maximum(first + call.offset - o.window + 1, 0)
        whole_low = jnp.maximum(last + call.offset - o.window + 1, 0)
    return _over(low, high, whole_low, whole_high, size, block, beside, visit, state)


def _over_queries(call: Call, block: jax.Array, beside: Beside, visit: Callable[..., Any], state: Any) -> Any:
    """`visit` each block of queries that see something of this block of keys."""
    o, size = call.options, call.blocks.queries
    first = block * call.blocks.keys
    last = first + call.blocks.keys - 1
    low: Any = jnp.int32(0)
    high: Any = jnp.int32(call.queries)
    whole_low: Any = jnp.int32(0)
    # A last block that is not full may be whole: its empty rows add nothing.
    whole_high: Any = jnp.int32(pl.cdiv(call.queries, size) * size)
    if o.causal or o.window is not None:
        low = jnp.maximum(first - call.offset, 0)
        whole_low = jnp.maximum(last - call.offset, 0)
    if o.window is not None:
        high = jnp.clip(last - call.offset + o.window, 0, call.queries)
        whole_high = jnp.clip(first - call.offset + o.window, 0, call.queries)
    return _over(low, high, whole_low, whole_high, size, block, beside, visit, state)


def _over(
    low: Any, high: Any, whole_low: Any, whole_high: Any, size: int, block: Any, beside: Beside, visit: Any, state: Any
) -> Any:
    """Blocks that hold positions low..high-1; those within whole_low..whole_high-1 need no mask. `block` is the one
    that this program holds."""
    begin, end = _div(low, size), _div(high + size - 1, size)
    if beside.begin is not None:
        begin = jnp.maximum(begin, beside.begin[block])
        end = jnp.minimum(end, beside.end[block])
        return jax.lax.fori_loop(begin, end, functools.partial(visit, masked=True), state)
    whole_begin = jnp.clip(_div(whole_low + size - 1, size), begin, jnp.maximum(begin, end))
    whole_end = jnp.clip(_div(whole_high, size), whole_begin, jnp.maximum(whole_begin, end))
    for start, stop, masked in (
        (begin, whole_begin, True),
        (whole_begin, whole_end, False),
        (whole_end, end, True),
    ):
        state = jax.lax.fori_loop(start, stop, functools.partial(visit, masked=masked), state)
    return state


def _div(x: Any, size: int) -> jax.Array:
    return jax.lax.div(x, jnp.int32(size))


def _turned() -> jax.Array:
    """The queries' block of this program: the last ones come first, since under `causal` they take the longest."""
    return pl.num_programs(0) - 1 - pl.program_id(0)


# ---------------------------------------------------------------- one block


def _dot(a: jax.Array, b: jax.Array, trans_b: bool = False) -> jax.Array:
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return plgpu.dot(a, b, trans_b=trans_b, precision=precision).astype(jnp.float32)


def _bent(call: Call, raw: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """Scores in `call.unit`, and what soft-capping makes of a change in them. Differences are taken before the unit is
    multiplied in: no more operations, and as exact for scores of 10,000 as for small ones."""
    o = call.options
    if o.soft_cap is None:
        return (raw if _is_unit(o.scale) else raw * o.scale), None
    bent = jnp.tanh(raw * (o.scale / o.soft_cap))
    return bent, 1.0 - bent * bent


def _power(call: Call, difference: jax.Array) -> jax.Array:
    """exp of a difference of scores."""
    return jnp.exp2(difference * (call.unit * LOG2E))


def _is_unit(scale: float) -> bool:
    """Positive, so that the largest product is the largest score, and not so small that a quotient overflows."""
    return scale > 1e-6


def _seen(call: Call, query: jax.Array, key: jax.Array, mine: Any, theirs: Any, dims: tuple[int, int]) -> jax.Array:
    seen = key < call.keys
    near = visible(query, key, offset=call.offset, causal=call.options.causal, window=call.options.window)
    if near is not None:
        seen &= near
    if mine is not None:
        seen &= jnp.expand_dims(mine, dims[0]) == jnp.expand_dims(theirs, dims[1])
    return seen


def _share(call: Call, seed: Any, row: jax.Array, query: jax.Array, key: jax.Array) -> jax.Array:
    """What dropout makes of each probability's weight: 0, or 1 / (1 - rate)."""
    rate = call.options.dropout
    words = (seed[0], seed[1])
    return jnp.where(kept(words, row, query, key, rate), 1.0 / (1.0 - rate), 0.0)


def _row() -> jax.Array:
    """Batch and head of this program as one number."""
    return pl.program_id(2) * pl.num_programs(1) + pl.program_id(1)


def _at(first: jax.Array, count: int) -> jax.Array:
    return first + jnp.arange(count, dtype=jnp.int32)


def _load(ref: Any, rows: Any, real: jax.Array, call: Call) -> jax.Array:
    columns = jnp.arange(call.wide, dtype=jnp.int32) < call.dim
    return plgpu.load(ref.at[*rows, :], mask=real[:, None] & columns[None, :], other=0.0)


def _store(ref: Any, x: jax.Array, real: jax.Array, call: Call) -> None:
    columns = jnp.arange(call.wide, dtype=jnp.int32) < call.dim
    plgpu.store(ref, x.astype(ref.dtype), mask=real[:, None] & columns[None, :])


def _load_row(ref: Any, first: Any, at: jax.Array, length: int, here: Any = None) -> jax.Array:
    here = pl.ds(first, at.shape[0]) if here is None else here
    return plgpu.load(ref.at[here], mask=at < length, other=-1)
