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
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.experimental.xla_metadata import set_xla_metadata
from jaxtyping import Array, Float

from .arguments import Extras, Options
from .block import Beside, Blocks, Call
from .blockwise import SAVED
from .programs import d_keys, d_queries, forward

MOST_DIM = 256


def attend(
    q: Float[Array, "batch queries heads dim"],
    k: Float[Array, "batch keys kv_heads dim"],
    v: Float[Array, "batch keys kv_heads dim"],
    options: Options,
    extras: Extras,
) -> tuple[Float[Array, "batch queries heads dim"], Float[Array, "batch heads queries"]]:
    """Output and log-sum-exp."""
    if q.shape[3] > MOST_DIM:
        raise ValueError(f"attention: q has dim {q.shape[3]}; the pallas implementation takes at most {MOST_DIM}")
    return _attend(options, q, k, v, extras)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(options: Options, q: jax.Array, k: jax.Array, v: jax.Array, extras: Extras) -> tuple[jax.Array, jax.Array]:
    return _forward(options, q, k, v, extras)[0]


def _forward(options: Options, q: jax.Array, k: jax.Array, v: jax.Array, extras: Extras) -> tuple[Any, Any]:
    batch, queries, heads, _ = q.shape
    call = _call(options, q, k, _forward_blocks)
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
        _beside(call, extras, by_keys=False),
    )
    out, lse = checkpoint_name(out, SAVED), checkpoint_name(lse, SAVED)
    return (out, lse), (q, k, v, extras, out, lse)


def _backward(options: Options, saved: Any, cotangents: tuple[jax.Array, jax.Array]) -> tuple[Any, ...]:
    q, k, v, extras, out, lse = saved
    d_out, d_lse = cotangents
    # d(loss)/d(score) = p (dp - inner): the row's product of output and cotangent, less the cotangent of the
    # log-sum-exp. A row that sees nothing has p = exp(-inf) = 0, once its log-sum-exp of -inf is out of the way.
    inner = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1).swapaxes(1, 2) - d_lse
    call = _call(options, q, k, _d_queries_blocks)
    rows = jnp.where(jnp.isneginf(lse), 0.0, lse / call.unit), inner
    d_out = d_out.astype(q.dtype)
    dq = _d_queries(call, q, k, v, d_out, rows, extras)
    dk, dv = _d_keys(_call(options, q, k, _d_keys_blocks), q, k, v, d_out, rows, extras)
    return dq, dk, dv, None


_attend.defvjp(_forward, _backward)


def _d_queries(call: Call, q: Any, k: Any, v: Any, d_out: Any, rows: Any, extras: Extras) -> jax.Array:
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
        _beside(call, extras, by_keys=False),
    )
    return dq


def _d_keys(call: Call, q: Any, k: Any, v: Any, d_out: Any, rows: Any, extras: Extras) -> tuple[Any, Any]:
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
        _beside(call, extras, by_keys=True),
    )
    return dk, dv


# ---------------------------------------------------------------- calling them


def _beside(call: Call, extras: Extras, *, by_keys: bool) -> Beside:
    if extras.segment_ids is None or extras.kv_segment_ids is None:
        return Beside(extras.seed)
    mine, theirs = _reach(extras.segment_ids, call.blocks.queries), _reach(extras.kv_segment_ids, call.blocks.keys)
    if by_keys:
        mine, theirs = theirs, mine
    (low, high), (other_low, other_high) = mine, theirs
    meets = (low[:, :, None] <= other_high[:, None]) & (other_low[:, None] <= high[:, :, None])
    count = meets.shape[2]
    begin = jnp.argmax(meets, axis=2).astype(jnp.int32)
    end = count - jnp.argmax(meets[:, :, ::-1], axis=2).astype(jnp.int32)
    return Beside(
        extras.seed, extras.segment_ids, extras.kv_segment_ids, begin, jnp.where(jnp.any(meets, axis=2), end, 0)
    )


def _reach(ids: jax.Array, block: int) -> tuple[jax.Array, jax.Array]:
    """Lowest and highest id of each block."""
    padded = jnp.pad(ids, ((0, 0), (0, -ids.shape[1] % block)), mode="edge").reshape(ids.shape[0], -1, block)
    return jnp.min(padded, axis=2), jnp.max(padded, axis=2)


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

    def call(interpret: bool) -> Callable[..., Any]:
        return pl.pallas_call(
            body,
            grid=grid,
            in_specs=[*specs, *map(_row_of_batch, given.values())],
            out_specs=out_specs,
            out_shape=out_shape,
            compiler_params=plgpu.CompilerParams(num_warps=blocks.warps, num_stages=blocks.stages),
            interpret=interpret,
            name=name,
        )

    with set_xla_metadata(flops_per_output=str(flops)):
        run = jax.lax.platform_dependent
        return run(*arrays, *given.values(), cpu=call(interpret=True), default=call(interpret=False))


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


def _call(options: Options, q: jax.Array, k: jax.Array, blocks: Callable[[int, int], Blocks]) -> Call:
    most = blocks(pl.next_power_of_2(q.shape[3]), q.dtype.itemsize)
    fitted = most._replace(
        queries=min(most.queries, max(16, pl.next_power_of_2(q.shape[1]))),
        keys=min(most.keys, max(16, pl.next_power_of_2(k.shape[1]))),
    )
    return Call(options, q.shape[1], k.shape[1], q.shape[3], fitted)


def _forward_blocks(dim: int, itemsize: int) -> Blocks:
    """Within the 99 KB of shared memory that a consumer GPU gives a block: (queries + 2 keys stages) dim numbers."""
    if itemsize == 4:
        return Blocks(64, 32, 4, 2) if dim <= 64 else Blocks(32, 16, 4, 2)
    if dim <= 64:
        return Blocks(128, 64, 8, 3)
    return Blocks(128, 64, 8, 2) if dim <= 128 else Blocks(64, 32, 8, 2)


def _d_queries_blocks(dim: int, itemsize: int) -> Blocks:
    if itemsize == 4:
        return Blocks(32, 32, 4, 1) if dim <= 128 else Blocks(16, 16, 4, 1)
    if dim <= 64:
        return Blocks(64, 64, 4, 2)
    return Blocks(64, 64, 8, 1) if dim <= 128 else Blocks(32, 32, 8, 1)


def _d_keys_blocks(dim: int, itemsize: int) -> Blocks:
    """Two sums of keys x dim stay in registers, so the queries' blocks are small: more, and they spill."""
    if itemsize == 4:
        return Blocks(32, 32, 4, 1) if dim <= 128 else Blocks(16, 16, 4, 1)
    if dim <= 64:
        return Blocks(32, 128, 8, 2)
    return Blocks(32, 64, 8, 1) if dim <= 128 else Blocks(32, 32, 8, 1)
