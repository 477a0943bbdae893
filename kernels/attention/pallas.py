"""Attention as Pallas kernels, compiled by Triton: Ampere and whatever came after it.

Forward (Dao, arXiv:2307.08691): a program holds a block of queries and goes over the keys that these may see, a block
at a time, with a running maximum and sum of each row. Of key blocks that every query sees whole nothing is masked;
those in which no query has a key of its own segment are not visited. Backward, two kernels without atomic additions, so
that the same input gives the same bits: one holds a block of queries and sums dq, one holds a block of keys and sums dk
and dv over the queries of all heads that share them. Both make the probabilities anew from the rows' log-sum-exp.

Bytes beside inputs and outputs: batch x heads x time x 2 numbers, never time x time. Time, with P visible pairs: 4 P
dim operations a head forward, 14 P dim backward (10 and the scores and their gradients a second time).

On a CPU the same kernels run interpreted, for tests.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jaxmem.kernels.launch import launch

from . import flash
from .block import Beside, Blocks, Call
from .flash import Passes
from .programs import d_keys, d_queries, forward


def _forward(call: Call, q: Any, k: Any, v: Any, beside: Beside) -> tuple[Any, Any]:
    batch, queries, heads, _ = q.shape
    grid = (pl.cdiv(queries, call.blocks.queries), heads, batch)
    out, lse = _run(
        "attention_forward",
        4 * call.pairs / queries,
        functools.partial(forward, call),
        grid,
        call.blocks,
        [_queries_block(call, grid), *_all_keys(call, heads // k.shape[2])],
        (q, k, v),
        [_queries_block(call, grid), _rows_block(call, grid)],
        [jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct((batch, heads, queries), jnp.float32)],
        beside,
    )
    return out, lse


def _d_queries(call: Call, q: Any, k: Any, v: Any, d_out: Any, rows: Any, beside: Beside) -> jax.Array:
    grid = (pl.cdiv(call.queries, call.blocks.queries), q.shape[2], q.shape[0])
    mine = _queries_block(call, grid)
    row = _rows_block(call, grid)
    (dq,) = _run(
        "attention_d_queries",
        6 * call.pairs / call.queries,
        functools.partial(d_queries, call),
        grid,
        call.blocks,
        [mine, *_all_keys(call, q.shape[2] // k.shape[2]), mine, row, row],
        (q, k, v, d_out, *rows),
        [mine],
        [jax.ShapeDtypeStruct(q.shape, q.dtype)],
        beside,
    )
    return dq


def _d_keys(call: Call, q: Any, k: Any, v: Any, d_out: Any, rows: Any, beside: Beside) -> tuple[Any, Any]:
    kv_heads = k.shape[2]
    groups = q.shape[2] // kv_heads
    grid = (pl.cdiv(call.keys, call.blocks.keys), kv_heads, k.shape[0])
    own = pl.BlockSpec((None, call.blocks.keys, None, call.wide), lambda j, n, b: (b, j, n, 0))
    theirs = pl.BlockSpec((None, call.queries, groups, call.wide), lambda _, n, b: (b, 0, n, 0))
    row = pl.BlockSpec((None, groups, call.queries), lambda _, n, b: (b, n, 0))
    dk, dv = _run(
        "attention_d_keys",
        8 * call.pairs * groups / call.keys,
        functools.partial(d_keys, call, groups),
        grid,
        call.blocks,
        [theirs, own, own, theirs, row, row],
        (q, k, v, d_out, *rows),
        [own, own],
        [jax.ShapeDtypeStruct(k.shape, k.dtype)] * 2,
        beside,
    )
    return dk, dv


def _run(
    name: str,
    flops: float,  # for each number of the first output: what a compiled program says of this kernel
    kernel: Callable[..., None],
    grid: tuple[int, int, int],
    blocks: Blocks,
    specs: list[pl.BlockSpec],
    arrays: tuple[jax.Array, ...],
    out_specs: list[pl.BlockSpec],
    out_shape: list[jax.ShapeDtypeStruct],
    beside: Beside,
) -> Any:
    given = {name: x for name, x in beside._asdict().items() if x is not None}
    count = len(arrays)

    def body(*refs: Any) -> None:
        extra = Beside(**dict(zip(given, refs[count:], strict=False)))
        kernel(*refs[:count], extra, *refs[count + len(given) :])

    return launch(
        name,
        body,
        (*arrays, *given.values()),
        grid=grid,
        in_specs=[*specs, *map(_row_of_batch, given.values())],
        out_specs=out_specs,
        out_shape=out_shape,
        warps=blocks.warps,
        stages=blocks.stages,
        flops=flops,
    )


def _queries_block(call: Call, grid: tuple[int, int, int]) -> pl.BlockSpec:
    return pl.BlockSpec((None, call.blocks.queries, None, call.wide), lambda i, h, b: (b, grid[0] - 1 - i, h, 0))


def _rows_block(call: Call, grid: tuple[int, int, int]) -> pl.BlockSpec:
    return pl.BlockSpec((None, None, call.blocks.queries), lambda i, h, b: (b, h, grid[0] - 1 - i))


def _row_of_batch(x: jax.Array) -> pl.BlockSpec:
    """All of a row of the batch; of the dropout's seed, which has none, all."""
    if x.ndim == 1:
        return pl.BlockSpec(x.shape, lambda *_: (0,))
    return pl.BlockSpec((None, x.shape[1]), lambda *at: (at[2], 0))


def _all_keys(call: Call, groups: int) -> list[pl.BlockSpec]:
    spec = pl.BlockSpec((None, call.keys, None, call.wide), lambda _, h, b: (b, 0, h // groups, 0))
    return [spec, spec]


PASSES = Passes("pallas", 256, _forward, _d_queries, _d_keys)
attend = functools.partial(flash.attend, PASSES)
