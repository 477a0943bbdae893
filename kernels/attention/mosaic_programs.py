"""The programs of the Mosaic GPU kernels: what the warpgroups of one program do. `mosaic.py` calls them.

Two warpgroups compute, each for `ROWS` rows of its own, as many as one `wgmma` takes; a third brings what they read by
TMA, some blocks ahead. Arrays in registers lie as products leave them (`WGMMA`): of numbers for each row, `BY_ROW`, of
numbers for each column, `BY_COLUMN`. TMA fills with zeros what it reads beyond the end of an array, and writes nothing
there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxmem.kernels.through_mosaic import THREAD

from .block import LOG2E, Beside, Call, bent, in_sight
from .mask import keeps, words_of_rows
from .visits import of_keys, of_queries, over

# The dimensions of the grid. A mesh around the kernel may have axes of shorter names.
HEAD, BLOCK, BATCH = "mosaic_head", "mosaic_block", "mosaic_batch"
ROWS = 64
COMPUTING = 2  # warpgroups
# Of the 65,536 registers of a multiprocessor, a thread that computes has these, and one that copies.
REGISTERS, FEW_REGISTERS = 240, 24

WGMMA = plgpu.Layout.WGMMA
BY_ROW, BY_COLUMN = WGMMA.reduce(1), WGMMA.reduce(0)


class Own(NamedTuple):
    """What a warpgroup reads once and keeps in shared memory: [COMPUTING, ...], and when it is there."""

    held: tuple[Any, ...]
    here: Any


class Stream(NamedTuple):
    """Blocks that come one after the other into [stages, ...]: when one is here, when its place is free."""

    held: tuple[Any, ...]
    here: Any
    free: Any


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
    block = _turned(call.queries, call.blocks.queries)
    beside = _of_batch(beside, batch)
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
        q, *ids = _own(own, number, q_ref.at[here], _part(beside.ids, first, ROWS))
        mine = _numbers(ids[0], BY_ROW) if ids else None
        at = _positions(ROWS, first, BY_ROW)
        words = _words(beside, batch * lax.axis_size(HEAD) + head, at)
        pl.when(number == 1)(lambda: plgpu.barrier_arrive(turns.at[0]))

        def softmax(j: Any, raw: Any, out: Any, top: Any, total: Any, *, masked: bool) -> Any:
            s, _ = bent(call, raw, _tanh)
            key = _positions(call.blocks.keys, j * call.blocks.keys, BY_COLUMN)
            slot = _slot(call, j - begin)
            if masked:
                theirs = _numbers(keys.held[1].at[slot], BY_COLUMN) if ids else None
                s = _masked(call, s, at, key, mine, theirs, (0, 1))
            plgpu.barrier_arrive(keys.free.at[slot])
            # The level that is subtracted is a whole power of two, so that its product with the base is exact and
            # sums shrink exactly. Until a row has seen a key it is -inf, and a difference of two of them no number.
            higher = jnp.maximum(top, lax.round(jnp.max(s, axis=1) * base, lax.RoundingMethod.TO_NEAREST_EVEN))
            level = jnp.where(higher == -jnp.inf, 0.0, higher)
            p = jnp.exp2(s * base - _along(level, shape, 0))
            shrink = jnp.exp2(top - level)
            total = total * shrink + jnp.sum(p, axis=1)
            out = out * _along(shrink, out.shape, 0)
            if words is not None:
                p = p * _kept_share(call, words, key, shape, (0, 1))
            return lax.optimization_barrier((out, p.astype(q.dtype), higher, total))

        def visit(j: Any, state: Any, *, masked: bool) -> Any:
            out, p, top, total = state
            slot, before = _slot(call, j - begin), _slot(call, j - 1 - begin)
            plgpu.barrier_wait(keys.here.at[slot])
            plgpu.barrier_wait(values.here.at[before])
            plgpu.barrier_wait(turns.at[number])

            def multiply(sums: Any) -> None:
                plgpu.wgmma(sums[0], p, values.held[0].at[before])
                plgpu.wgmma(sums[1], q, keys.held[0].at[slot].transpose((1, 0)))
                plgpu.barrier_arrive(turns.at[1 - number])

            out, raw = pl.run_state(multiply)(
                (plgpu.WGMMAAccumulatorRef.init(out), plgpu.WGMMAAccumulatorRef.init(_zeros(shape, WGMMA)))
            )
            plgpu.barrier_arrive(values.free.at[before])
            return softmax(j, raw, out, top, total, masked=masked)

        plgpu.barrier_wait(keys.here.at[0])
        (raw,) = _products(shape, (q, keys.held[0].at[0].transpose((1, 0))))
        nothing = _zeros((ROWS, q.shape[-1]), WGMMA), _zeros((ROWS,), BY_ROW) - jnp.inf, _zeros((ROWS,), BY_ROW)
        state = softmax(begin, raw, *nothing, masked=True)
        rest = [part._replace(start=jnp.maximum(part.start, begin + 1)) for part in visits]
        out, p, top, total = over(rest, visit, state)
        last = _slot(call, end - 1 - begin)
        plgpu.barrier_wait(values.here.at[last])
        (out,) = _plus((out, p, values.held[0].at[last]))
        seen = total > 0
        total = jnp.where(seen, total, 1.0)
        q[...] = (out * _along(1.0 / total, out.shape, 0)).astype(q.dtype)
        rows = rows_held.at[number]
        rows[...] = jnp.where(seen, top * (1.0 / LOG2E) + jnp.log(total), -jnp.inf)
        _written((q, out_ref.at[here]), (rows, lse_ref.at[batch, head, pl.ds(first, ROWS)]))

    @pl.when(number == COMPUTING)
    def _() -> None:
        plgpu.set_max_registers(FEW_REGISTERS, action="decrease")
        kv_head = lax.div(head, jnp.int32(groups))

        def bring(j: Any) -> None:
            at = j * call.blocks.keys
            here, n = (batch, pl.ds(at, call.blocks.keys), kv_head), j - begin
            _bring(call, keys, n, k_ref.at[here], _part(beside.kv_ids, at, call.blocks.keys))
            _bring(call, values, n, v_ref.at[here])

        pl.loop(begin, end)(bring)


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
    block = _turned(call.queries, call.blocks.queries)
    beside = _of_batch(beside, batch)
    visits = of_keys(call, block, beside)
    shape = (ROWS, call.blocks.keys)
    base = call.unit * LOG2E

    @pl.when(number < COMPUTING)
    def _() -> None:
        plgpu.set_max_registers(REGISTERS, action="increase")
        first = block * call.blocks.queries + number * ROWS
        here, rows = (batch, pl.ds(first, ROWS), head), (batch, head, pl.ds(first, ROWS))
        q, d_out, *held = _own(
            own,
            number,
            q_ref.at[here],
            d_out_ref.at[here],
            lse_ref.at[rows],
            inner_ref.at[rows],
            _part(beside.ids, first, ROWS),
        )
        lse, inner, *ids = (_numbers(x, BY_ROW) for x in held)
        level = lse * base
        at = _positions(ROWS, first, BY_ROW)
        words = _words(beside, batch * lax.axis_size(HEAD) + head, at)

        def visit(j: Any, dq: Any, *, masked: bool) -> Any:
            slot = _slot(call, j - visits[0].start)
            k, v = keys.held[0].at[slot], values.held[0].at[slot]
            plgpu.barrier_wait(keys.here.at[slot])
            plgpu.barrier_wait(values.here.at[slot])
            raw, dp = _products(shape, (q, k.transpose((1, 0))), (d_out, v.transpose((1, 0))))
            plgpu.barrier_arrive(values.free.at[slot])
            s, slope = bent(call, raw, _tanh)
            key = _positions(call.blocks.keys, j * call.blocks.keys, BY_COLUMN)
            if masked:
                theirs = _numbers(keys.held[1].at[slot], BY_COLUMN) if ids else None
                s = _masked(call, s, at, key, ids[0] if ids else None, theirs, (0, 1))
            p = jnp.exp2(s * base - _along(level, shape, 0))
            if words is not None:
                dp = dp * _kept_share(call, words, key, shape, (0, 1))
            ds = p * (dp - _along(inner, shape, 0))
            ds = ds if slope is None else ds * slope
            (dq,) = _plus((dq, ds.astype(q.dtype), k))
            plgpu.barrier_arrive(keys.free.at[slot])
            return dq

        dq = over(visits, visit, _zeros((ROWS, q.shape[-1]), WGMMA))
        q[...] = (dq * call.options.scale).astype(q.dtype)
        _written((q, dq_ref.at[here]))

    @pl.when(number == COMPUTING)
    def _() -> None:
        plgpu.set_max_registers(FEW_REGISTERS, action="decrease")
        kv_head = lax.div(head, jnp.int32(groups))

        def bring(j: Any) -> None:
            at = j * call.blocks.keys
            here, n = (batch, pl.ds(at, call.blocks.keys), kv_head), j - visits[0].start
            _bring(call, keys, n, k_ref.at[here], _part(beside.kv_ids, at, call.blocks.keys))
            _bring(call, values, n, v_ref.at[here])

        pl.loop(visits[0].start, visits[-1].stop)(bring)


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
    beside = _of_batch(beside, batch)
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
        k, v, *ids = _own(own, number, k_ref.at[here], v_ref.at[here], _part(beside.kv_ids, first, ROWS))
        theirs = _numbers(ids[0], BY_ROW) if ids else None
        key = _positions(ROWS, first, BY_ROW)

        def of_head(g: Any, sums: Any) -> Any:
            def visit(i: Any, sums: Any, *, masked: bool) -> Any:
                slot = _slot(call, g * count + i - begin)
                plgpu.barrier_wait(queries.here.at[slot])
                q, d_out, lse, inner, *mine = (x.at[slot] for x in queries.held)
                (raw,) = _products(shape, (k, q.transpose((1, 0))))
                s, slope = bent(call, raw, _tanh)
                at = _positions(call.blocks.queries, i * call.blocks.queries, BY_COLUMN)
                if masked:
                    s = _masked(call, s, at, key, _numbers(mine[0], BY_COLUMN) if mine else None, theirs, (1, 0))
                p = jnp.exp2(s * base - _along(_numbers(lse, BY_COLUMN) * base, shape, 1))
                shared, share = p, None
                if (words := _words(beside, (batch * lax.axis_size(HEAD) + kv_head) * groups + g, at)) is not None:
                    share = _kept_share(call, words, key, shape, (1, 0))
                    shared = p * share
                dk, dv = sums
                (dv,) = _plus((dv, shared.astype(q.dtype), d_out))
                product = v, d_out.transpose((1, 0))
                if share is None:  # the product is added to what is to be subtracted from it: fewer registers
                    (change,) = _plus((-_along(_numbers(inner, BY_COLUMN), shape, 1), *product))
                else:
                    (dp,) = _products(shape, product)
                    change = dp * share - _along(_numbers(inner, BY_COLUMN), shape, 1)
                ds = p * change
                ds = ds if slope is None else ds * slope
                (dk,) = _plus((dk, ds.astype(q.dtype), q))
                plgpu.barrier_arrive(queries.free.at[slot])
                return dk, dv

            return over(visits, visit, sums)

        zeros = _zeros((ROWS, k.shape[-1]), WGMMA)
        dk, dv = lax.fori_loop(0, groups, of_head, (zeros, zeros))
        k[...] = (dk * call.options.scale).astype(k.dtype)
        v[...] = dv.astype(v.dtype)
        _written((k, dk_ref.at[here]), (v, dv_ref.at[here]))

    @pl.when(number == COMPUTING)
    def _() -> None:
        plgpu.set_max_registers(FEW_REGISTERS, action="decrease")

        def bring(g: Any, i: Any) -> None:
            at, head = pl.ds(i * call.blocks.queries, call.blocks.queries), kv_head * groups + g
            here, rows = (batch, at, head), (batch, head, at)
            _bring(
                call,
                queries,
                g * count + i - begin,
                q_ref.at[here],
                d_out_ref.at[here],
                lse_ref.at[rows],
                inner_ref.at[rows],
                _part(beside.ids, i * call.blocks.queries, call.blocks.queries),
            )

        pl.loop(0, groups)(lambda g: pl.loop(begin, end)(lambda i: bring(g, i)))


# ---------------------------------------------------------------- places


def _turned(length: int, size: int) -> jax.Array:
    """The queries' block of this program: the last ones come first, since under `causal` they take the longest."""
    return pl.cdiv(length, size) - 1 - lax.axis_index(BLOCK)


def _slot(call: Call, n: Any) -> jax.Array:
    """Where the n-th block of a stream lies."""
    return lax.rem(n, jnp.int32(call.blocks.stages))


def _positions(count: int, first: Any, layout: Any) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, (count,), 0, layout=layout) + first


def _of_batch(beside: Beside, batch: Any) -> Beside:
    """The seed has no rows of the batch."""
    rows = [None if x is None else x.at[batch] for x in beside[1:]]
    return Beside(beside.seed, *rows)


def _part(ids: Any, first: Any, size: int) -> Any:
    return None if ids is None else ids.at[pl.ds(first, size)]


# ---------------------------------------------------------------- copies


def _own(own: Own, number: Any, *sources: Any) -> list[Any]:
    """This warpgroup's own part, brought."""
    held = [x.at[number] for x in own.held]
    for source, target in zip((x for x in sources if x is not None), held, strict=True):
        plgpu.copy_gmem_to_smem(source, target, own.here.at[number])
    plgpu.barrier_wait(own.here.at[number])
    return held


def _bring(call: Call, stream: Stream, n: Any, *sources: Any) -> None:
    """The n-th block, once its place is free."""
    slot = _slot(call, n)
    pl.when(n >= call.blocks.stages)(lambda: plgpu.barrier_wait(stream.free.at[slot]))
    for source, held in zip((x for x in sources if x is not None), stream.held, strict=True):
        plgpu.copy_gmem_to_smem(source, held.at[slot], stream.here.at[slot])


def _written(*parts: tuple[Any, Any]) -> None:
    plgpu.commit_smem()
    for source, target in parts:
        plgpu.copy_smem_to_gmem(source, target)
    plgpu.wait_smem_to_gmem(0)


# ---------------------------------------------------------------- arithmetic


def _zeros(shape: tuple[int, ...], layout: Any) -> jax.Array:
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)


def _numbers(ref: Any, layout: Any) -> jax.Array:
    return plgpu.layout_cast(ref[...], layout)


def _along(x: jax.Array, shape: tuple[int, ...], dim: int) -> jax.Array:
    return lax.broadcast_in_dim(x, shape, (dim,))


def _products(shape: tuple[int, int], *pairs: tuple[Any, Any]) -> list[jax.Array]:
    """a @ b of each, all begun before the first is waited for."""

    def multiply(*sums: Any) -> list[jax.Array]:
        for held, (a, b) in zip(sums, pairs, strict=True):
            plgpu.wgmma(held, a, b)
        return [held[...] for held in sums]

    return pl.run_scoped(multiply, *[plgpu.WGMMAAccumulatorRef(shape, jnp.float32)] * len(pairs))


def _plus(*terms: tuple[jax.Array, Any, Any]) -> tuple[jax.Array, ...]:
    """sum + a @ b of each."""

    def multiply(sums: Any) -> None:
        for held, (_, a, b) in zip(sums, terms, strict=True):
            plgpu.wgmma(held, a, b)

    return pl.run_state(multiply)(tuple(plgpu.WGMMAAccumulatorRef.init(x) for x, _, _ in terms))


def _tanh(x: jax.Array) -> jax.Array:
    """The GPU's own is good to 11 bits. exp2 overflows to infinity or to 0, and both give the right end."""
    return 1.0 - 2.0 / (jnp.exp2(x * (2.0 * LOG2E)) + 1.0)


def _masked(call: Call, s: jax.Array, at: Any, key: Any, mine: Any, theirs: Any, dims: tuple[int, int]) -> jax.Array:
    """`dims`: along which one of the scores the queries lie, and the keys."""
    at, key, mine, theirs = (
        None if x is None else _along(x, s.shape, dim) for x, dim in zip((at, key, mine, theirs), 2 * dims, strict=True)
    )
    return jnp.where(in_sight(call, at, key, mine, theirs), s, -jnp.inf)


def _words(beside: Beside, row: Any, at: jax.Array) -> Any:
    """Of dropout, for a row of batch and heads and queries at these positions."""
    return None if beside.seed is None else words_of_rows((beside.seed[0], beside.seed[1]), row, at)


def _kept_share(call: Call, words: Any, key: jax.Array, shape: tuple[int, ...], dims: tuple[int, int]) -> jax.Array:
    """What dropout makes of each probability's weight: 0, or 1 / (1 - rate)."""
    rate = call.options.dropout
    first, second = (_along(x, shape, dims[0]) for x in words)
    kept = keeps(first, second, _along(key, shape, dims[1]), rate)
    return jnp.where(kept, 1.0 / (1.0 - rate), 0.0)
