"""The forward program of the Mosaic GPU kernels. `mosaic.py` launches it.

Two warpgroups compute, each for `ROWS` rows, the number of rows of one `wgmma`; a third copies the blocks that they
read, by TMA and some blocks ahead."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxmem.kernels.mosaic_launch import THREAD

from . import mosaic_parts as parts
from .block import LOG2E, Call, MaskArrays, capped_scores, loop_over, visited_blocks
from .mosaic_parts import BATCH, BLOCK, BY_COLUMN, BY_ROW, COMPUTING, HEAD, ROWS, WGMMA, Own, Stream


def forward(
    call: Call,
    groups: int,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    masks: MaskArrays,
    out_ref: Any,
    lse_ref: Any,
    *,
    own: Own,
    keys: Stream,
    values: Stream,
    rows_held: Any,
    turns: Any,
) -> None:
    """The two warpgroups alternate: the matmuls of one (its scores, and the probabilities of the previous block with
    the values) overlap the softmax of the other. Each program visits at least one block, which initializes the sums."""
    number, head, batch = (lax.axis_index(name) for name in (THREAD, HEAD, BATCH))
    # The last blocks start first, since they take longest with a causal mask.
    block = pl.cdiv(call.queries, call.blocks.queries) - 1 - lax.axis_index(BLOCK)
    masks = parts.select_batch(masks, batch)
    ranges = visited_blocks(call, block, masks, by_keys=False)
    begin = jnp.minimum(ranges[0].start, pl.cdiv(call.keys, call.blocks.keys) - 1)
    end = jnp.maximum(ranges[-1].stop, begin + 1)
    shape = (ROWS, call.blocks.keys)
    base = call.unit * LOG2E

    @pl.when(number < COMPUTING)
    def _() -> None:
        plgpu.set_max_registers(parts.REGISTERS, action="increase")
        first = block * call.blocks.queries + number * ROWS
        here = (batch, pl.ds(first, ROWS), head)
        q, *ids = parts.copy_own(own, number, q_ref.at[here], parts.slice_ids(masks.ids, first, ROWS))
        mine = parts.load_as(ids[0], BY_ROW) if ids else None
        at = parts.positions(ROWS, first, BY_ROW)
        pl.when(number == 1)(lambda: plgpu.barrier_arrive(turns.at[0]))

        def softmax(j: Any, raw: Any, out: Any, top: Any, total: Any, *, masked: bool) -> Any:
            s, _ = capped_scores(call, raw, parts.tanh)
            key = parts.positions(call.blocks.keys, j * call.blocks.keys, BY_COLUMN)
            slot = parts.slot_of(call, j - begin)
            if masked:
                theirs = parts.load_as(keys.blocks[1].at[slot], BY_COLUMN) if ids else None
                s = parts.masked_scores(call, s, at, key, mine, theirs, (0, 1))
            plgpu.barrier_arrive(keys.free.at[slot])
            # The subtracted level is an integer (an exponent of 2), so that sums are rescaled exactly. A row without
            # visible keys so far has a level of -inf, and -inf minus -inf is NaN.
            higher = jnp.maximum(top, lax.round(jnp.max(s, axis=1) * base, lax.RoundingMethod.TO_NEAREST_EVEN))
            level = jnp.where(higher == -jnp.inf, 0.0, higher)
            p = jnp.exp2(s * base - parts.broadcast_along(level, shape, 0))
            shrink = jnp.exp2(top - level)
            total = total * shrink + jnp.sum(p, axis=1)
            out = out * parts.broadcast_along(shrink, out.shape, 0)
            return lax.optimization_barrier((out, p.astype(q.dtype), higher, total))

        def visit(j: Any, state: Any, *, masked: bool) -> Any:
            out, p, top, total = state
            slot, before = parts.slot_of(call, j - begin), parts.slot_of(call, j - 1 - begin)
            plgpu.barrier_wait(keys.arrived.at[slot])
            plgpu.barrier_wait(values.arrived.at[before])
            plgpu.barrier_wait(turns.at[number])

            def multiply(sums: Any) -> None:
                plgpu.wgmma(sums[0], p, values.blocks[0].at[before])
                plgpu.wgmma(sums[1], q, keys.blocks[0].at[slot].transpose((1, 0)))
                plgpu.barrier_arrive(turns.at[1 - number])

            out, raw = pl.run_state(multiply)(
                (plgpu.WGMMAAccumulatorRef.init(out), plgpu.WGMMAAccumulatorRef.init(parts.zeros_in(shape, WGMMA)))
            )
            plgpu.barrier_arrive(values.free.at[before])
            return softmax(j, raw, out, top, total, masked=masked)

        plgpu.barrier_wait(keys.arrived.at[0])
        raw = parts.matmul(shape, q, keys.blocks[0].at[0].transpose((1, 0)))
        nothing = (
            parts.zeros_in((ROWS, q.shape[-1]), WGMMA),
            parts.zeros_in((ROWS,), BY_ROW) - jnp.inf,
            parts.zeros_in((ROWS,), BY_ROW),
        )
        state = softmax(begin, raw, *nothing, masked=True)
        rest = [part._replace(start=jnp.maximum(part.start, begin + 1)) for part in ranges]
        out, p, top, total = loop_over(rest, visit, state)
        last = parts.slot_of(call, end - 1 - begin)
        plgpu.barrier_wait(values.arrived.at[last])
        add_values = lambda accumulator: plgpu.wgmma(accumulator, p, values.blocks[0].at[last])  # noqa: E731
        out = pl.run_state(add_values)(plgpu.WGMMAAccumulatorRef.init(out))
        seen = total > 0
        total = jnp.where(seen, total, 1.0)
        q[...] = (out * parts.broadcast_along(1.0 / total, out.shape, 0)).astype(q.dtype)
        rows = rows_held.at[number]
        rows[...] = jnp.where(seen, top * (1.0 / LOG2E) + jnp.log(total), -jnp.inf)
        parts.write_back((q, out_ref.at[here]), (rows, lse_ref.at[batch, head, pl.ds(first, ROWS)]))

    @pl.when(number == COMPUTING)
    def _() -> None:
        plgpu.set_max_registers(parts.FEW_REGISTERS, action="decrease")
        kv_head, size = lax.div(head, jnp.int32(groups)), call.blocks.keys

        @pl.loop(begin, end)
        def _(j: Any) -> None:
            here = (batch, pl.ds(j * size, size), kv_head)
            parts.copy_next(call, keys, j - begin, k_ref.at[here], parts.slice_ids(masks.kv_ids, j * size, size))
            parts.copy_next(call, values, j - begin, v_ref.at[here])
