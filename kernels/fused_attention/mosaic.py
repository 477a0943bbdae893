"""Attention for Hopper, compiled by Mosaic GPU, following FlashAttention-3 (Shah et al., arXiv:2407.08608).

A program has three warpgroups. One copies by TMA; two multiply by asynchronous `wgmma`. In the forward pass, one of
these two multiplies while the other computes its softmax. The backward pass of heads of width 64 and
128 is one kernel with 5 matmuls: 10 operations per pair and dimension, dq in float32, and sums whose order differs
between runs. All other backward passes (`deterministic`, other widths) use the kernels of `triton.py`: 14 operations,
and bitwise equal results for equal inputs.

It supports 16-bit dtypes. Heads whose width is not in `WIDTHS` are copied and padded with zeros.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxmem.kernels.mosaic_launch import MosaicKernel, launch
from jaxmem.kernels.typing import Ref, Tree

from . import flash, triton
from .arguments import Extras, Options, Residuals
from .flash import AttentionCall, MaskArrays
from .mosaic_parts import (
    BATCH,
    BLOCK,
    COMPUTE_WARPGROUPS,
    HEAD,
    ROWS,
    BackwardMemory,
    FixedBlocks,
    ForwardMemory,
    SharedGradients,
    Stream,
)
from .mosaic_programs import forward
from .mosaic_programs import gradients as gradients_program

WIDTHS = (64, 96, 128, 256)
# Widths of the one-kernel backward pass: two warpgroups share the columns evenly, in tiles, and the sums of dk and dv
# fit in the 240 registers of a thread.
ONE_PASS = (64, 128)


def attend(q: jax.Array, k: jax.Array, v: jax.Array, options: Options, extras: Extras) -> tuple[jax.Array, jax.Array]:
    call = flash.call_for(("mosaic", "forward"), options, q, k, COMPUTE_WARPGROUPS * ROWS)
    batch, queries, heads, _ = q.shape
    arrays = q, k, v = _pad_width(q, k, v)
    ids = extras.segment_ids is not None
    size = call.blocks.queries
    rows = jax.ShapeDtypeStruct((batch, heads, pl.cdiv(queries, size) * size), jnp.float32)
    memory = ForwardMemory(
        fixed=_fixed(q, of=1, ids=ids),
        keys=_stream(call, call.blocks.keys, q, of=1, ids=ids),
        values=_stream(call, call.blocks.keys, q, of=1),
        rows=plgpu.SMEM((COMPUTE_WARPGROUPS, ROWS), jnp.float32),
        turns=plgpu.Barrier(num_barriers=COMPUTE_WARPGROUPS),
    )
    out, lse = _run(forward, call, arrays, extras, (q, rows), memory, 4 * call.pairs / queries)
    return out[..., : call.dim], lse[..., :queries]


def gradients(
    saved: Residuals, d_out: jax.Array, d_lse: jax.Array | None, options: Options, extras: Extras
) -> tuple[jax.Array, ...]:
    if options.deterministic or _width(d_out.shape[3]) not in ONE_PASS:
        return triton.gradients(saved, d_out, d_lse, options, extras)
    call = flash.call_for(("mosaic", "gradients"), options, saved.q, saved.k, COMPUTE_WARPGROUPS * ROWS)
    q, k, *others = _pad_width(*saved[:3], d_out)
    ids = extras.segment_ids is not None
    size = call.blocks.queries
    half = q.shape[3] // COMPUTE_WARPGROUPS
    rows = (_pad_rows(x, size) for x in flash.backward_rows(saved, d_out, d_lse, options))
    line = min(128, 2 * half)
    ds = plgpu.SMEM((2, COMPUTE_WARPGROUPS, ROWS, size), q.dtype, transforms=_tiles(q.dtype, line))
    dq = plgpu.SMEM((COMPUTE_WARPGROUPS, size, half), jnp.float32, transforms=_tiles(jnp.float32, 128))
    memory = BackwardMemory(
        fixed=_fixed(q, of=2, ids=ids, line=line),
        queries=_stream(call, size, q, of=2, numbers=2, ids=ids, line=line),
        together=SharedGradients(ds, plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS), dq),
    )
    flops = 10 * call.pairs / call.queries
    outputs = _run(gradients_program, call, (q, k, *others, *rows), extras, (k, k), memory, flops)
    dk, dv, sums = (x[..., : call.dim] for x in outputs)
    return (sums * options.scale).astype(q.dtype), dk, dv


def _run(
    program: Callable[..., None],
    call: AttentionCall,
    arrays: Sequence[Any],
    extras: Extras,
    outputs: Sequence[Any],
    memory: Ref,
    flops: float,
) -> list[jax.Array]:
    """The outputs; for the backward pass also dq in float32, without the factor `scale`."""
    batch, _, heads, wide = arrays[0].shape
    kv_heads = arrays[1].shape[2]
    by_keys = program is gradients_program
    count = len(arrays)
    masks = flash.mask_arrays(call, extras, batch, by_keys=by_keys)
    ids = {"ids": _pad_rows(masks.ids, call.blocks.queries), "kv_ids": _pad_rows(masks.kv_ids, call.blocks.keys)}
    present = {name: x for name, x in masks._replace(**ids)._asdict().items() if x is not None}

    def body(*refs: Any) -> None:
        masked = MaskArrays(**dict.fromkeys(ids) | dict(zip(present, refs[count:], strict=False)))
        program(call, heads // kv_heads, refs[:count], masked, refs[count + len(present) : -1], refs[-1])

    kernel = MosaicKernel(
        "attention_gradients" if by_keys else "attention_forward",
        body,
        grid={HEAD: kv_heads if by_keys else heads, BLOCK: masks.ranges.shape[1], BATCH: batch},
        warpgroups=COMPUTE_WARPGROUPS + 1,
        memory=memory,
        flops=flops * call.dim / wide,
    )
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outputs]
    sums = [jax.ShapeDtypeStruct(arrays[0].shape, jnp.float32)] if by_keys else []
    return launch(kernel, (*arrays, *present.values()), shapes, sums)


def _fixed(like: jax.Array, *, of: int, ids: bool, line: int = 128) -> FixedBlocks:
    blocks = _shared_rows(COMPUTE_WARPGROUPS, ROWS, like, of, 0, ids, line)
    return FixedBlocks(blocks, plgpu.Barrier(num_arrivals=len(blocks), num_barriers=COMPUTE_WARPGROUPS))


def _stream(
    call: AttentionCall, size: int, like: jax.Array, *, of: int, numbers: int = 0, ids: bool = False, line: int = 128
) -> Stream:
    stages = call.blocks.stages
    held = _shared_rows(stages, size, like, of, numbers, ids, line)
    here = plgpu.Barrier(num_arrivals=len(held), num_barriers=stages)
    return Stream(held, here, plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS, num_barriers=stages))


def _shared_rows(
    count: int, size: int, like: jax.Array, of: int, numbers: int, ids: bool, line: int
) -> tuple[Any, ...]:
    """Shared memory for `count` blocks of `size` rows. Each block has `of` arrays with the dtype and width of `like`,
    `numbers` float32 vectors and, with `ids`, segment ids."""
    wide = like.shape[-1]
    tiles = _tiles(like.dtype, line if wide % 64 == 0 else 64)
    rows = [jnp.float32] * numbers + [jnp.int32] * ids
    blocks = [plgpu.SMEM((count, size, wide), like.dtype, transforms=tiles)] * of
    return (*blocks, *(plgpu.SMEM((count, size), dtype) for dtype in rows))


def _tiles(dtype: Any, line: int) -> tuple[Any, Any]:
    """The layout that `wgmma` reads: tiles of 8 rows of `line` bytes."""
    return plgpu.TilingTransform((8, line // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(line)


def _width(dim: int) -> int:
    return min((width for width in WIDTHS if width >= dim), default=dim)


def _pad_width(*arrays: jax.Array) -> list[jax.Array]:
    dim = arrays[0].shape[3]
    wide = _width(dim)
    return [jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, wide - dim))) if dim < wide else x for x in arrays]


def _pad_rows(rows: Any, size: int) -> Tree:
    """Rows padded to complete blocks, because TMA needs rows that begin at multiples of 16 bytes."""
    return None if rows is None else jnp.pad(rows, (*[(0, 0)] * (rows.ndim - 1), (0, -rows.shape[-1] % size)))
