"""The programs of the Mosaic GPU kernels: what the warpgroups of one program do. `mosaic.py` calls them.

Two warpgroups compute, each for `ROWS` rows of its own, as many as one `wgmma` takes; a third brings what they read by
TMA, some blocks ahead.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxmem.kernels.warpgroups import THREAD

from .block import LOG2E, Beside, Call, bent
from .mosaic_parts import (
    BATCH,
    BLOCK,
    BY_COLUMN,
    BY_ROW,
    COMPUTING,
    FEW_REGISTERS,
    HEAD,
    REGISTERS,
    ROWS,
    WGMMA,
    Own,
    Stream,
    along,
    bring_next,
    brought,
    kept_share,
    masked_scores,
    numbers,
    of_batch,
    part_of,
    plus,
    positions,
    products,
    slot_of,
    tanh,
    turned,
    words_of,
    write_back,
    zeros_in,
)
from .visits import of_keys, of_queries, over


def forward(
    call: Call,
    groups: int,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    beside: Beside,
    out_ref: Any,
    lse_ref: Any,
    *,
    own: Own,
    keys: Stream,
    values: Stream,
    rows_held: Any,
    turns: Any,
) -> None:
    """The two warpgroups take turns: the products of one, of its scores and with the probabilities of the block before,
    hide the softmax of the other. Each program visits one block at least, so that there is something to begin with."""
    number, head, batch = (lax.axis_index(name) for name in (THREAD, HEAD, BATCH))
    block = turned(call.queries, call.blocks.queries)
    beside = of_batch(beside, batch)
    visits = of_keys(call, block, beside)
    begin = jnp.minimum(visits[0].start, pl.cdiv(call.keys, call.blocks.keys) - 1)
    end = jnp.maximum(visits[-1].stop, begin + 1)
    shape = (ROWS, call.blocks.keys)
    base = call.unit * LOG2E

    @pl.when(number < COMPUTING)
    def _() -> None:
        plgpu.set_max_registers(REGISTERS, action="increase")
        first = block * call.blocks.queries + number * ROWS
        here = (batch, pl.ds(first, ROWS), head)
        q, *ids = brought(own, number, q_ref.at[here], part_of(beside.ids, first, ROWS))
        mine = numbers(ids[0], BY_ROW) if ids else None
        at = positions(ROWS, first, BY_ROW)
        words = words_of(beside, batch * lax.axis_size(HEAD) + head, at)
        pl.when(number == 1)(lambda: plgpu.barrier_arrive(turns.at[0]))

        def softmax(j: Any, raw: Any, out: Any, top: Any, total: Any, *, masked: bool) -> Any:
            s, _ = bent(call, raw, tanh)
            key = positions(call.blocks.keys, j * call.blocks.keys, BY_COLUMN)
            slot = slot_of(call, j - begin)
            if masked:
                theirs = numbers(keys.held[1].at[slot], BY_COLUMN) if ids else None
                s = masked_scores(call, s, at, key, mine, theirs, (0, 1))
            plgpu.barrier_arrive(keys.free.at[slot])
            # The level that is subtracted is a whole power of two, so that its product with the base is exact and
            # sums shrink exactly. Until a row has seen a key it is -inf, and a difference of two of them no number.
            higher = jnp.maximum(top, lax.round(jnp.max(s, axis=1) * base, lax.RoundingMethod.TO_NEAREST_EVEN))
            level = jnp.where(higher == -jnp.inf, 0.0, higher)
            p = jnp.exp2(s * base - along(level, shape, 0))
            shrink = jnp.exp2(top - level)
            total = total * shrink + jnp.sum(p, axis=1)
            out = out * along(shrink, out.shape, 0)
            if words is not None:
                p = p * kept_share(call, words, key, shape, (0, 1))
            return lax.optimization_barrier((out, p.astype(q.dtype), higher, total))

        def visit(j: Any, state: Any, *, masked: bool) -> Any:
            out, p, top, total = state
            slot, before = slot_of(call, j - begin), slot_of(call, j - 1 - begin)
            plgpu.barrier_wait(keys.here.at[slot])
            plgpu.barrier_wait(values.here.at[before])
            plgpu.barrier_wait(turns.at[number])

            def multiply(sums: Any) -> None:
                plgpu.wgmma(sums[0], p, values.held[0].at[before])
                plgpu.wgmma(sums[1], q, keys.held[0].at[slot].transpose((1, 0)))
                plgpu.barrier_arrive(turns.at[1 - number])

            out, raw = pl.run_state(multiply)(
                (plgpu.WGMMAAccumulatorRef.init(out), plgpu.WGMMAAccumulatorRef.init(zeros_in(shape, WGMMA)))
            )
            plgpu.barrier_arrive(values.free.at[before])
            return softmax(j, raw, out, top, total, masked=masked)

        plgpu.barrier_wait(keys.here.at[0])
        (raw,) = products(shape, (q, keys.held[0].at[0].transpose((1, 0))))
        nothing = zeros_in((ROWS, q.shape[-1]), WGMMA), zeros_in((ROWS,), BY_ROW) - jnp.inf, zeros_in((ROWS,), BY_ROW)
        state = softmax(begin, raw, *nothing, masked=True)
        rest = [part._replace(start=jnp.maximum(part.start, begin + 1)) for part in visits]
        out, p, top, total = over(rest, visit, state)
        last = slot_of(call, end - 1 - begin)
        plgpu.barrier_wait(values.here.at[last])
        (out,) = plus((out, p, values.held[0].at[last]))
        seen = total > 0
        total = jnp.where(seen, total, 1.0)
        q[...] = (out * along(1.0 / total, out.shape, 0)).astype(q.dtype)
        rows = rows_held.at[number]
        rows[...] = jnp.where(seen, top * (1.0 / LOG2E) + jnp.log(total), -jnp.inf)
        write_back((q, out_ref.at[here]), (rows, lse_ref.at[batch, head, pl.ds(first, ROWS)]))

    @pl.when(number == COMPUTING)
    def _() -> None:
        _bring_keys(call, batch, head, groups, begin, end, (k_ref, v_ref, beside.kv_ids), keys, values)


def d_queries(
    call: Call,
    groups: int,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    d_out_ref: Any,
    lse_ref: Any,
    inner_ref: Any,
    beside: Beside,
    dq_ref: Any,
    *,
    own: Own,
    keys: Stream,
    values: Stream,
) -> None:
    number, head, batch = (lax.axis_index(name) for name in (THREAD, HEAD, BATCH))
    block = turned(call.queries, call.blocks.queries)
    beside = of_batch(beside, batch)
    visits = of_keys(call, block, beside)
    shape = (ROWS, call.blocks.keys)
    base = call.unit * LOG2E

    @pl.when(number < COMPUTING)
    def _() -> None:
        plgpu.set_max_registers(REGISTERS, action="increase")
        first = block * call.blocks.queries + number * ROWS
        here, rows = (batch, pl.ds(first, ROWS), head), (batch, head, pl.ds(first, ROWS))
        q, d_out, *held = brought(
            own,
            number,
            q_ref.at[here],
            d_out_ref.at[here],
            lse_ref.at[rows],
            inner_ref.at[rows],
            part_of(beside.ids, first, ROWS),
        )
        lse, inner, *ids = (numbers(x, BY_ROW) for x in held)
        level = lse * base
        at = positions(ROWS, first, BY_ROW)
        words = words_of(beside, batch * lax.axis_size(HEAD) + head, at)

        def visit(j: Any, dq: Any, *, masked: bool) -> Any:
            slot = slot_of(call, j - visits[0].start)
            k, v = keys.held[0].at[slot], values.held[0].at[slot]
            plgpu.barrier_wait(keys.here.at[slot])
            plgpu.barrier_wait(values.here.at[slot])
            raw, dp = products(shape, (q, k.transpose((1, 0))), (d_out, v.transpose((1, 0))))
            plgpu.barrier_arrive(values.free.at[slot])
            s, slope = bent(call, raw, tanh)
            key = positions(call.blocks.keys, j * call.blocks.keys, BY_COLUMN)
            if masked:
                theirs = numbers(keys.held[1].at[slot], BY_COLUMN) if ids else None
                s = masked_scores(call, s, at, key, ids[0] if ids else None, theirs, (0, 1))
            p = jnp.exp2(s * base - along(level, shape, 0))
            if words is not None:
                dp = dp * kept_share(call, words, key, shape, (0, 1))
            ds = p * (dp - along(inner, shape, 0))
            ds = ds if slope is None else ds * slope
            (dq,) = plus((dq, ds.astype(q.dtype), k))
            plgpu.barrier_arrive(keys.free.at[slot])
            return dq

        dq = over(visits, visit, zeros_in((ROWS, q.shape[-1]), WGMMA))
        q[...] = (dq * call.options.scale).astype(q.dtype)
        write_back((q, dq_ref.at[here]))

    @pl.when(number == COMPUTING)
    def _() -> None:
        _bring_keys(
            call, batch, head, groups, visits[0].start, visits[-1].stop, (k_ref, v_ref, beside.kv_ids), keys, values
        )


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
    *,
    own: Own,
    queries: Stream,
) -> None:
    """Scores lie transposed, keys by queries, as both sums read them."""
    number, block, kv_head, batch = (lax.axis_index(name) for name in (THREAD, BLOCK, HEAD, BATCH))
    beside = of_batch(beside, batch)
    visits = of_queries(call, block, beside)
    begin, end = visits[0].start, visits[-1].stop
    count = jnp.maximum(end - begin, 0)
    shape = (ROWS, call.blocks.queries)
    base = call.unit * LOG2E

    @pl.when(number < COMPUTING)
    def _() -> None:
        plgpu.set_max_registers(REGISTERS, action="increase")
        first = block * call.blocks.keys + number * ROWS
        here = (batch, pl.ds(first, ROWS), kv_head)
        k, v, *ids = brought(own, number, k_ref.at[here], v_ref.at[here], part_of(beside.kv_ids, first, ROWS))
        theirs = numbers(ids[0], BY_ROW) if ids else None
        key = positions(ROWS, first, BY_ROW)

        def of_head(g: Any, sums: Any) -> Any:
            def visit(i: Any, sums: Any, *, masked: bool) -> Any:
                slot = slot_of(call, g * count + i - begin)
                plgpu.barrier_wait(queries.here.at[slot])
                q, d_out, lse, inner, *mine = (x.at[slot] for x in queries.held)
                (raw,) = products(shape, (k, q.transpose((1, 0))))
                s, slope = bent(call, raw, tanh)
                at = positions(call.blocks.queries, i * call.blocks.queries, BY_COLUMN)
                if masked:
                    s = masked_scores(call, s, at, key, numbers(mine[0], BY_COLUMN) if mine else None, theirs, (1, 0))
                p = jnp.exp2(s * base - along(numbers(lse, BY_COLUMN) * base, shape, 1))
                shared, share = p, None
                if (words := words_of(beside, (batch * lax.axis_size(HEAD) + kv_head) * groups + g, at)) is not None:
                    share = kept_share(call, words, key, shape, (1, 0))
                    shared = p * share
                dk, dv = sums
                (dv,) = plus((dv, shared.astype(q.dtype), d_out))
                product = v, d_out.transpose((1, 0))
                if share is None:  # the product is added to what is to be subtracted from it: fewer registers
                    (change,) = plus((-along(numbers(inner, BY_COLUMN), shape, 1), *product))
                else:
                    (dp,) = products(shape, product)
                    change = dp * share - along(numbers(inner, BY_COLUMN), shape, 1)
                ds = p * change
                ds = ds if slope is None else ds * slope
                (dk,) = plus((dk, ds.astype(q.dtype), q))
                plgpu.barrier_arrive(queries.free.at[slot])
                return dk, dv

            return over(visits, visit, sums)

        zeros = zeros_in((ROWS, k.shape[-1]), WGMMA)
        dk, dv = lax.fori_loop(0, groups, of_head, (zeros, zeros))
        k[...] = (dk * call.options.scale).astype(k.dtype)
        v[...] = dv.astype(v.dtype)
        write_back((k, dk_ref.at[here]), (v, dv_ref.at[here]))

    @pl.when(number == COMPUTING)
    def _() -> None:
        plgpu.set_max_registers(FEW_REGISTERS, action="decrease")

        def bring(g: Any, i: Any) -> None:
            at, head = pl.ds(i * call.blocks.queries, call.blocks.queries), kv_head * groups + g
            here, rows = (batch, at, head), (batch, head, at)
            bring_next(
                call,
                queries,
                g * count + i - begin,
                q_ref.at[here],
                d_out_ref.at[here],
                lse_ref.at[rows],
                inner_ref.at[rows],
                part_of(beside.ids, i * call.blocks.queries, call.blocks.queries),
            )

        pl.loop(0, groups)(lambda g: pl.loop(begin, end)(lambda i: bring(g, i)))


def _bring_keys(
    call: Call,
    batch: Any,
    head: Any,
    groups: int,
    begin: Any,
    end: Any,
    sources: tuple[Any, Any, Any],
    keys: Stream,
    values: Stream,
) -> None:
    """What the third warpgroup does where a program goes through the keys from one block to another."""
    plgpu.set_max_registers(FEW_REGISTERS, action="decrease")
    k_ref, v_ref, kv_ids = sources
    kv_head = lax.div(head, jnp.int32(groups))

    def bring(j: Any) -> None:
        at = j * call.blocks.keys
        here, n = (batch, pl.ds(at, call.blocks.keys), kv_head), j - begin
        bring_next(call, keys, n, k_ref.at[here], part_of(kv_ids, at, call.blocks.keys))
        bring_next(call, values, n, v_ref.at[here])

    pl.loop(begin, end)(bring)
