"""The two programs of the Mosaic GPU kernels, forward and backward. `mosaic.py` launches them.

Two warpgroups compute, each for `ROWS` rows, the number of rows of one `wgmma`; a third copies the blocks that they
read, by TMA and some blocks ahead. The backward program has a block of keys: it accumulates dk and dv of this block in
registers, and adds its part of dq to global memory by TMA. The order of these additions differs between runs."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxmem.kernels.mosaic_launch import THREAD
from jaxmem.kernels.typing import Index, Ref, Tree

from . import mosaic_parts as parts
from .flash import LOG2E, AttentionCall, MaskArrays
from .mosaic_parts import (
    BATCH,
    BLOCK,
    BY_COLUMN,
    BY_ROW,
    COMPUTE_WARPGROUPS,
    HEAD,
    ROWS,
    WGMMA,
    BackwardMemory,
    ForwardMemory,
    SharedGradients,
)

Refs = tuple[Any, ...]


def forward(
    call: AttentionCall, groups: int, arrays: Refs, masks: MaskArrays, outputs: Refs, memory: ForwardMemory
) -> None:
    """The two warpgroups alternate: the matmuls of one (its scores, and the probabilities of the previous block with
    the values) overlap the softmax of the other. Each program visits at least one block, which initializes the sums."""
    (q_ref, k_ref, v_ref), (out_ref, lse_ref), (fixed, keys, values, rows_held, turns) = arrays, outputs, memory
    number, head, batch = (lax.axis_index(name) for name in (THREAD, HEAD, BATCH))
    # The last blocks start first, since they take longest with a causal mask.
    block = pl.cdiv(call.queries, call.blocks.queries) - 1 - lax.axis_index(BLOCK)
    masks = parts.select_batch(masks, batch)
    begin, end, ranges = parts.visited_blocks(call, block, masks, by_keys=False)
    begin = jnp.minimum(begin, pl.cdiv(call.keys, call.blocks.keys) - 1)
    end = jnp.maximum(end, begin + 1)
    shape = (ROWS, call.blocks.keys)
    base = call.unit * LOG2E

    @pl.when(number < COMPUTE_WARPGROUPS)
    def _() -> None:
        plgpu.set_max_registers(parts.COMPUTE_REGISTERS, action="increase")
        first = block * call.blocks.queries + number * ROWS
        here = (batch, pl.ds(first, ROWS), head)
        q, *ids = parts.copy_fixed(fixed, number, q_ref.at[here], parts.slice_ids(masks.ids, first, ROWS))
        mine = parts.load_as(ids[0], BY_ROW) if ids else None
        at = parts.positions(ROWS, first, BY_ROW)
        pl.when(number == 1)(lambda: plgpu.barrier_arrive(turns.at[0]))

        def softmax(j: Index, raw: Tree, out: Any, top: Tree, total: Tree, *, masked: bool) -> Tree:
            s, _ = parts.capped_scores(call, raw)
            key = parts.positions(call.blocks.keys, j * call.blocks.keys, BY_COLUMN)
            slot = parts.slot_of(call, j - begin)
            if masked:
                theirs = parts.load_as(keys.blocks[1].at[slot], BY_COLUMN) if ids else None
                s = parts.masked_scores(call, s, at, key, (mine, theirs), (0, 1))
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

        def visit(j: Index, state: Tree, *, masked: bool) -> Tree:
            out, p, top, total = state
            slot = parts.slot_of(call, j - begin)
            before = parts.slot_of(call, j - 1 - begin)
            plgpu.barrier_wait(keys.arrived.at[slot])
            plgpu.barrier_wait(values.arrived.at[before])
            plgpu.barrier_wait(turns.at[number])

            def multiply(sums: Tree) -> None:
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
        masked_ranges = [part._replace(start=jnp.maximum(part.start, begin + 1)) for part in ranges]
        out, p, top, total = parts.loop_over(masked_ranges, visit, state)
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

    @pl.when(number == COMPUTE_WARPGROUPS)
    def _() -> None:
        plgpu.set_max_registers(parts.COPY_REGISTERS, action="decrease")
        kv_head = lax.div(head, jnp.int32(groups))
        size = call.blocks.keys

        @pl.loop(begin, end)
        def _(j: Index) -> None:
            here = (batch, pl.ds(j * size, size), kv_head)
            parts.copy_next(call, keys, j - begin, k_ref.at[here], parts.slice_ids(masks.kv_ids, j * size, size))
            parts.copy_next(call, values, j - begin, v_ref.at[here])


def gradients(
    call: AttentionCall, groups: int, arrays: Refs, masks: MaskArrays, outputs: Refs, memory: BackwardMemory
) -> None:
    """Writes dk and dv, and adds to dq, in float32 and without the factor `scale`. The scores are transposed, [keys,
    queries], as the matmuls of dk and dv read them. dq sums over the keys of both warpgroups: they share their parts of
    the gradient of the scores, and each computes half of the columns of dq."""
    (q_ref, k_ref, v_ref, d_out_ref, lse_ref, inner_ref), (dq_ref, dk_ref, dv_ref) = arrays, outputs
    fixed, queries, together = memory
    number, block, kv_head, batch = (lax.axis_index(name) for name in (THREAD, BLOCK, HEAD, BATCH))
    masks = parts.select_batch(masks, batch)
    begin, end, ranges = parts.visited_blocks(call, block, masks, by_keys=True)
    count = jnp.maximum(end - begin, 0)
    size = call.blocks.queries
    shape = (ROWS, size)
    base = call.unit * LOG2E
    # If there are enough registers, the matmul of the gradient runs while the scores become probabilities.
    running = 1 if call.options.soft_cap is None else 0

    @pl.when(number < COMPUTE_WARPGROUPS)
    def _() -> None:
        plgpu.set_max_registers(parts.COMPUTE_REGISTERS, action="increase")
        first = block * call.blocks.keys + number * ROWS
        here = (batch, pl.ds(first, ROWS), kv_head)
        _, _, *ids = parts.copy_fixed(
            fixed, number, k_ref.at[here], v_ref.at[here], parts.slice_ids(masks.kv_ids, first, ROWS)
        )
        theirs = parts.load_as(ids[0], BY_ROW) if ids else None
        key = parts.positions(ROWS, first, BY_ROW)

        def of_head(g: Any, sums: Tree) -> Tree:
            def visit(i: Index, sums: Tree, *, masked: bool) -> Tree:
                n = g * count + i - begin
                slot = parts.slot_of(call, n)
                zero = parts.opaque_zero(n)
                k, v = (x.at[number + zero] for x in fixed.blocks[:2])
                plgpu.barrier_wait(queries.arrived.at[slot])
                q, d_out, lse, inner, *mine = (x.at[slot] for x in queries.blocks)
                at = parts.positions(size, i * size, BY_COLUMN)
                less = -parts.broadcast_along(parts.load_as(inner, BY_COLUMN), shape, 1)

                def multiply(accumulator: Tree) -> None:
                    dk, dv, scores, change = accumulator
                    plgpu.wgmma(scores, k, q.transpose((1, 0)))
                    plgpu.wgmma(change, v, d_out.transpose((1, 0)))
                    s, slope = parts.capped_scores(call, plgpu.wgmma_accumulator_load(scores, wait_n=running))
                    if masked:
                        ours = parts.load_as(mine[0], BY_COLUMN) if mine else None
                        s = parts.masked_scores(call, s, at, key, (ours, theirs), (1, 0))
                    p = jnp.exp2(s * base - parts.broadcast_along(parts.load_as(lse, BY_COLUMN) * base, shape, 1))
                    plgpu.wgmma(dv, p.astype(q.dtype), d_out)
                    ds = p * plgpu.wgmma_accumulator_load(change, wait_n=1)
                    ds = (ds if slope is None else ds * slope).astype(q.dtype)
                    there = dq_ref.at[batch, pl.ds(i * size, size), kv_head * groups + g]
                    _add_to_dq(
                        together, n, number, ds, (dk, q), fixed.blocks[0].at[pl.ds(zero, COMPUTE_WARPGROUPS)], there
                    )

                zeros = parts.zeros_in(shape, WGMMA)
                # The matmul adds to the negative of `inner`, which saves registers.
                starts = *sums, zeros, less
                dk, dv, *_ = pl.run_state(multiply)(tuple(map(plgpu.WGMMAAccumulatorRef.init, starts)))
                plgpu.barrier_arrive(queries.free.at[slot])
                return dk, dv

            return parts.loop_over(ranges, visit, sums)

        k, v = (x.at[number] for x in fixed.blocks[:2])
        zeros = parts.zeros_in((ROWS, k.shape[-1]), WGMMA)
        dk, dv = lax.fori_loop(0, groups, of_head, (zeros, zeros))
        _synchronize(together)  # before this, the other warpgroup may read these keys
        k[...] = (dk * call.options.scale).astype(k.dtype)
        v[...] = dv.astype(v.dtype)
        parts.write_back((k, dk_ref.at[here]), (v, dv_ref.at[here]))

    @pl.when(number == COMPUTE_WARPGROUPS)
    def _() -> None:
        plgpu.set_max_registers(parts.COPY_REGISTERS, action="decrease")

        def copy_block(g: Any, i: Index) -> None:
            at = pl.ds(i * size, size)
            head = kv_head * groups + g
            here = (batch, at, head)
            rows = (batch, head, at)
            sources = q_ref.at[here], d_out_ref.at[here], lse_ref.at[rows], inner_ref.at[rows]
            ids = parts.slice_ids(masks.ids, i * size, size)
            parts.copy_next(call, queries, g * count + i - begin, *sources, ids)

        pl.loop(0, groups)(lambda g: pl.loop(begin, end)(lambda i: copy_block(g, i)))


def _add_to_dq(
    together: SharedGradients, n: Index, number: Index, ds: jax.Array, dk: tuple[Any, Any], keys: Index, dq_ref: Ref
) -> None:
    """The matmul of dk, and this warpgroup's columns of the matmul of dq over the keys of both warpgroups. `n`: the
    index of the block of queries."""
    both = together.ds.at[lax.rem(n, 2)]
    both.at[number][...] = ds
    _synchronize(together)
    size, columns = together.dq.shape[-2:]
    half = pl.ds(number * columns, columns)

    def multiply(dq: Tree) -> None:
        for part in range(COMPUTE_WARPGROUPS):
            plgpu.wgmma(dq, both.at[part].transpose((1, 0)), keys.at[part, :, half])
        plgpu.wgmma(dk[0], ds, dk[1])
        gradient = plgpu.wgmma_accumulator_load(dq, wait_n=1)
        out = together.dq.at[number]
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
