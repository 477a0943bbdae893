"""Attention for Hopper, compiled by Mosaic GPU, following FlashAttention-3 (Shah et al., arXiv:2407.08608).

A program has three warpgroups. One copies by TMA; two multiply by asynchronous `wgmma`. In the forward pass the latter
two alternate, so that the matmuls of one overlap the softmax of the other. The backward pass of heads of width 64 and
128 is one kernel with 5 matmuls: 10 operations per pair and dimension, dq in float32, and sums whose order differs
between runs. All other backward passes (`deterministic`, other widths) use the kernels of `triton.py`: 14 operations,
and bitwise equal results for equal inputs.

It supports 16-bit dtypes. Heads whose width is not in `WIDTHS` are copied and padded with zeros.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxmem.kernels.mosaic_launch import launch

from . import flash, triton
from .arguments import Extras, Options
from .flash import AttentionCall, MaskArrays, Passes
from .mosaic_parts import BATCH, BLOCK, COMPUTING, HEAD, ROWS, OwnBlocks, SharedGradients, Stream
from .mosaic_programs import forward
from .mosaic_programs import gradients as gradients_program

WIDTHS = (64, 96, 128, 256)
# Widths of the one-kernel backward pass: two warpgroups share the columns evenly, in tiles, and the sums of dk and dv
# fit in the 240 registers of a thread.
ONE_PASS = (64, 128)


def _forward(call: AttentionCall, q: Any, k: Any, v: Any, masks: MaskArrays) -> tuple[Any, Any]:
    batch, queries, heads, _ = q.shape
    q, k, v = _widened(q, k, v)
    ids = masks.ids is not None
    size = call.blocks.queries
    rows = jax.ShapeDtypeStruct((batch, heads, pl.cdiv(queries, size) * size), jnp.float32)
    out, lse = _run(
        "attention_forward",
        4 * call.pairs / queries,
        functools.partial(forward, call, heads // k.shape[2]),
        call,
        (q, k, v),
        masks,
        [q, rows],
        heads=heads,
        by_keys=False,
        scratch={
            "own": _own(q, of=1, ids=ids),
            "keys": _stream(call, call.blocks.keys, q, of=1, ids=ids),
            "values": _stream(call, call.blocks.keys, q, of=1),
            "rows_held": plgpu.SMEM((COMPUTING, ROWS), jnp.float32),
            "turns": plgpu.Barrier(num_barriers=COMPUTING),
        },
    )
    return out[..., : call.dim], lse[..., :queries]


def _gradients(
    call: AttentionCall, q: Any, k: Any, v: Any, d_out: Any, rows: Any, masks: MaskArrays
) -> tuple[Any, Any, Any]:
    heads, kv_heads, dtype = q.shape[2], k.shape[2], q.dtype
    q, k, v, d_out = _widened(q, k, v, d_out)
    ids = masks.ids is not None
    size, half = call.blocks.queries, q.shape[3] // COMPUTING
    line = min(128, 2 * half)
    ds = plgpu.SMEM((2, COMPUTING, ROWS, size), q.dtype, transforms=_tiles(q.dtype, line))
    dq = plgpu.SMEM((COMPUTING, size, half), jnp.float32, transforms=_tiles(jnp.float32, 128))
    found = _run(
        "attention_gradients",
        10 * call.pairs / call.queries,
        functools.partial(gradients_program, call, heads // kv_heads),
        call,
        (q, k, v, d_out, *(_filled(x, size) for x in rows)),
        masks,
        [k, k],
        heads=kv_heads,
        by_keys=True,
        scratch={
            "own": _own(q, of=2, ids=ids, line=line),
            "queries": _stream(call, size, q, of=2, numbers=2, ids=ids, line=line),
            "together": SharedGradients(ds, plgpu.Barrier(num_arrivals=COMPUTING), dq),
        },
        sums=[jax.ShapeDtypeStruct(q.shape, jnp.float32)],
    )
    dk, dv, sums = (x[..., : call.dim] for x in found)
    return (sums * call.options.scale).astype(dtype), dk, dv


def _run(
    name: str,
    flops: float,
    kernel: Callable[..., None],
    call: AttentionCall,
    arrays: tuple[Any, ...],
    masks: MaskArrays,
    outputs: list[Any],
    *,
    heads: int,
    by_keys: bool,
    scratch: dict[str, Any],
    sums: Sequence[jax.ShapeDtypeStruct] = (),
) -> list[jax.Array]:
    masks = masks._replace(ids=_filled(masks.ids, call.blocks.queries), kv_ids=_filled(masks.kv_ids, call.blocks.keys))
    present = {name: x for name, x in masks._asdict().items() if x is not None}
    count = len(arrays)

    def body(*refs: Any, **scratch: Any) -> None:
        extra = MaskArrays(**dict(zip(present, refs[count:], strict=False)))
        kernel(*refs[:count], extra, *refs[count + len(present) :], **scratch)

    blocks = pl.cdiv(call.keys, call.blocks.keys) if by_keys else pl.cdiv(call.queries, call.blocks.queries)
    return launch(
        name,
        body,
        (*arrays, *present.values()),
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outputs],
        grid={HEAD: heads, BLOCK: blocks, BATCH: arrays[0].shape[0]},
        warpgroups=COMPUTING + 1,
        sums=sums,
        scratch=scratch,
        flops=flops * call.dim / arrays[0].shape[3],
    )


def _own(like: jax.Array, *, of: int, numbers: int = 0, ids: bool, line: int = 128) -> OwnBlocks:
    blocks = _shared_rows(COMPUTING, ROWS, like, of, numbers, ids, line)
    return OwnBlocks(blocks, plgpu.Barrier(num_arrivals=len(blocks), num_barriers=COMPUTING))


def _stream(
    call: AttentionCall, size: int, like: jax.Array, *, of: int, numbers: int = 0, ids: bool = False, line: int = 128
) -> Stream:
    stages = call.blocks.stages
    held = _shared_rows(stages, size, like, of, numbers, ids, line)
    here = plgpu.Barrier(num_arrivals=len(held), num_barriers=stages)
    return Stream(held, here, plgpu.Barrier(num_arrivals=COMPUTING, num_barriers=stages))


def _shared_rows(
    count: int, size: int, like: jax.Array, of: int, numbers: int, ids: bool, line: int
) -> tuple[Any, ...]:
    """Shared memory for `count` blocks of `size` rows: `of` arrays like `like`, `numbers` float32 vectors; with `ids`,
    segment ids."""
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


def _widened(*arrays: jax.Array) -> list[jax.Array]:
    dim = arrays[0].shape[3]
    wide = _width(dim)
    return [jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, wide - dim))) if dim < wide else x for x in arrays]


def _filled(rows: Any, size: int) -> Any:
    """Rows padded to complete blocks, because TMA needs rows that begin at multiples of 16 bytes."""
    return None if rows is None else jnp.pad(rows, (*[(0, 0)] * (rows.ndim - 1), (0, -rows.shape[-1] % size)))


PASSES = Passes("mosaic", _forward, min_block=COMPUTING * ROWS, two_kernels=triton.PASSES)


def attend(q: jax.Array, k: jax.Array, v: jax.Array, options: Options, extras: Extras) -> tuple[jax.Array, jax.Array]:
    return flash.attend(_passes(q), q, k, v, options, extras)


def gradients(q: jax.Array, *others: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    return flash.gradients(_passes(q), q, *others)


def _passes(q: jax.Array) -> Passes:
    return PASSES._replace(one_pass=_gradients) if _width(q.shape[3]) in ONE_PASS else PASSES
