"""The backward program of the Mosaic GPU kernels: dq, dk and dv in 5 matmuls. `mosaic.py` launches it.

A program has a block of keys. It accumulates dk and dv of this block in registers, and adds its part of dq to global
memory by TMA. The order of these additions differs between runs."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxmem.kernels.mosaic_launch import THREAD

from . import mosaic_parts as parts
from .block import LOG2E, Call, MaskArrays, capped_scores, loop_over, visited_blocks
from .mosaic_parts import BATCH, BLOCK, BY_COLUMN, BY_ROW, COMPUTING, HEAD, ROWS, WGMMA, Own, SharedGradients, Stream


def gradients(
    call: Call,
    groups: int,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    d_out_ref: Any,
    lse_ref: Any,
    inner_ref: Any,
    masks: MaskArrays,
    dq_ref: Any,
    dk_ref: Any,
    dv_ref: Any,
    *,
    own: Own,
    queries: Stream,
    together: SharedGradients,
) -> None:
    """Writes dk and dv, and adds to dq, in float32 and without the factor `scale`. The scores are transposed, [keys,
    queries], as the matmuls of dk and dv read them. dq sums over the keys of both warpgroups: they share their parts of
    the gradient of the scores, and each computes half of the columns of dq."""
    number, block, kv_head, batch = (lax.axis_index(name) for name in (THREAD, BLOCK, HEAD, BATCH))
    masks = parts.select_batch(masks, batch)
    ranges = visited_blocks(call, block, masks, by_keys=True)
    begin, end = ranges[0].start, ranges[-1].stop
    count = jnp.maximum(end - begin, 0)
    size = call.blocks.queries
    shape = (ROWS, size)
    base = call.unit * LOG2E
    # If there are enough registers, the matmul of the gradient runs while the scores become probabilities.
    running = 1 if call.options.soft_cap is None else 0

    @pl.when(number < COMPUTING)
    def _() -> None:
        plgpu.set_max_registers(parts.REGISTERS, action="increase")
        first = block * call.blocks.keys + number * ROWS
        here = (batch, pl.ds(first, ROWS), kv_head)
        _, _, *ids = parts.copy_own(
            own, number, k_ref.at[here], v_ref.at[here], parts.slice_ids(masks.kv_ids, first, ROWS)
        )
        theirs = parts.load_as(ids[0], BY_ROW) if ids else None
        key = parts.positions(ROWS, first, BY_ROW)

        def of_head(g: Any, sums: Any) -> Any:
            def visit(i: Any, sums: Any, *, masked: bool) -> Any:
                n = g * count + i - begin
                slot, zero = parts.slot_of(call, n), parts.opaque_zero(n)
                k, v = (x.at[number + zero] for x in own.blocks[:2])
                plgpu.barrier_wait(queries.arrived.at[slot])
                q, d_out, lse, inner, *mine = (x.at[slot] for x in queries.blocks)
                at = parts.positions(size, i * size, BY_COLUMN)
                less = -parts.broadcast_along(parts.load_as(inner, BY_COLUMN), shape, 1)

                def multiply(accumulator: Any) -> None:
                    dk, dv, scores, change = accumulator
                    plgpu.wgmma(scores, k, q.transpose((1, 0)))
                    plgpu.wgmma(change, v, d_out.transpose((1, 0)))
                    s, slope = capped_scores(call, plgpu.wgmma_accumulator_load(scores, wait_n=running), parts.tanh)
                    if masked:
                        ours = parts.load_as(mine[0], BY_COLUMN) if mine else None
                        s = parts.masked_scores(call, s, at, key, ours, theirs, (1, 0))
                    p = jnp.exp2(s * base - parts.broadcast_along(parts.load_as(lse, BY_COLUMN) * base, shape, 1))
                    plgpu.wgmma(dv, p.astype(q.dtype), d_out)
                    ds = p * plgpu.wgmma_accumulator_load(change, wait_n=1)
                    ds = (ds if slope is None else ds * slope).astype(q.dtype)
                    there = dq_ref.at[batch, pl.ds(i * size, size), kv_head * groups + g]
                    _add_to_dq(together, n, number, ds, (dk, q), own.blocks[0].at[pl.ds(zero, COMPUTING)], there)

                zeros = parts.zeros_in(shape, WGMMA)
                # The matmul adds to the negative of `inner`, which saves registers.
                starts = *sums, zeros, less
                dk, dv, *_ = pl.run_state(multiply)(tuple(map(plgpu.WGMMAAccumulatorRef.init, starts)))
                plgpu.barrier_arrive(queries.free.at[slot])
                return dk, dv

            return loop_over(ranges, visit, sums)

        k, v = (x.at[number] for x in own.blocks[:2])
        zeros = parts.zeros_in((ROWS, k.shape[-1]), WGMMA)
        dk, dv = lax.fori_loop(0, groups, of_head, (zeros, zeros))
        _synchronize(together)  # before this, the other warpgroup may read these keys
        k[...] = (dk * call.options.scale).astype(k.dtype)
        v[...] = dv.astype(v.dtype)
        parts.write_back((k, dk_ref.at[here]), (v, dv_ref.at[here]))

    @pl.when(number == COMPUTING)
    def _() -> None:
        plgpu.set_max_registers(parts.FEW_REGISTERS, action="decrease")

        def copy_block(g: Any, i: Any) -> None:
            at, head = pl.ds(i * size, size), kv_head * groups + g
            here, rows = (batch, at, head), (batch, head, at)
            sources = q_ref.at[here], d_out_ref.at[here], lse_ref.at[rows], inner_ref.at[rows]
            ids = parts.slice_ids(masks.ids, i * size, size)
            parts.copy_next(call, queries, g * count + i - begin, *sources, ids)

        pl.loop(0, groups)(lambda g: pl.loop(begin, end)(lambda i: copy_block(g, i)))


def _add_to_dq(
    together: SharedGradients, n: Any, number: Any, ds: jax.Array, dk: tuple[Any, Any], keys: Any, dq_ref: Any
) -> None:
    """The matmul of dk, and this warpgroup's columns of the matmul of dq over the keys of both warpgroups. `n`: the
    index of the block of queries."""
    both = together.ds.at[lax.rem(n, 2)]
    both.at[number][...] = ds
    _synchronize(together)
    size, columns = together.dq.shape[-2:]
    half = pl.ds(number * columns, columns)

    def multiply(dq: Any) -> None:
        for part in range(COMPUTING):
            plgpu.wgmma(dq, both.at[part].transpose((1, 0)), keys.at[part, :, half])
        plgpu.wgmma(dk[0], ds, dk[1])
        gradient, out = plgpu.wgmma_accumulator_load(dq, wait_n=1), together.dq.at[number]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        out[...] = gradient
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out, dq_ref.at[:, half], reduction_op="add")

    pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((size, columns), jnp.float32))


def _synchronize(together: SharedGradients) -> None:
    """After this, each warpgroup sees what the other has written to shared memory."""
    plgpu.commit_smem()
    plgpu.barrier_arrive(together.arrived)
    plgpu.barrier_wait(together.arrived)
