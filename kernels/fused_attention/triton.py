"""Attention as Triton kernels, launched through jax-triton: NVIDIA GPUs from Ampere on.

In the forward pass (Dao, arXiv:2307.08691) a program has a block of queries, and visits the keys of these queries block
by block, with a running maximum and sum of each row. BlockSizes of keys without masked elements are computed without a
mask; blocks without a key of the queries' segments are skipped. The backward pass has two kernels without atomic
additions, so equal inputs have bitwise equal gradients: one has a block of queries and sums dq, the other has a block
of keys and sums dk and dv over the queries of all heads that share them. Both recompute the probabilities from the
log-sum-exp.

In addition to inputs and outputs they store batch x heads x sequence x 2 values, never sequence squared. With P
unmasked pairs they need 4 P dim operations per head forward, and 14 P dim backward: 10, plus 4 because both kernels
compute the scores and their gradients.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem.kernels.triton_launch import launch, load_programs

from . import flash
from .flash import LOG2E, AttentionCall, MaskArrays, Passes


@dataclass(frozen=True)
class AttentionStatic:
    """Compile-time values of the programs. `rows` and `columns`: queries and keys of a block."""

    queries: int
    keys: int
    heads: int
    kv_heads: int
    dim: int
    wide: int
    rows: int
    columns: int
    causal: bool
    window: int | None
    segments: bool
    scale: float
    factor: float  # score / dot product of q and k
    tanh_factor: float | None  # with a soft cap: 2 log2(e) times the argument of tanh / dot product of q and k
    unit: float  # `AttentionCall.unit`
    base: float  # exponent of 2 / difference of scores

    @property
    def groups(self) -> int:
        return self.heads // self.kv_heads

    @property
    def offset(self) -> int:
        return self.keys - self.queries

    @property
    def stride(self) -> int:
        return self.heads * self.dim

    @property
    def kv_stride(self) -> int:
        return self.kv_heads * self.dim


def static(call: AttentionCall, heads: int, kv_heads: int, *, segments: bool) -> AttentionStatic:
    o = call.options
    return AttentionStatic(
        queries=call.queries,
        keys=call.keys,
        heads=heads,
        kv_heads=kv_heads,
        dim=call.dim,
        wide=max(16, call.wide),
        rows=call.blocks.queries,
        columns=call.blocks.keys,
        causal=o.causal or o.window is not None,
        window=o.window,
        segments=segments,
        scale=o.scale,
        factor=1.0 if call.unit == o.scale else o.scale,
        tanh_factor=None if o.soft_cap is None else 2.0 * LOG2E * o.scale / o.soft_cap,
        unit=call.unit,
        base=call.unit * LOG2E,
    )


def _forward(call: AttentionCall, q: Any, k: Any, v: Any, masks: MaskArrays) -> tuple[Any, Any]:
    batch, queries, heads, _ = q.shape
    rows = jax.ShapeDtypeStruct((batch, heads, queries), jnp.float32)
    out, lse = _run(
        "attention_forward", call, q, k, (q, k, v), masks, [q, rows], flops=4 * call.pairs / queries, by_keys=False
    )
    return out, lse


def _d_queries(call: AttentionCall, q: Any, k: Any, v: Any, d_out: Any, rows: Any, masks: MaskArrays) -> jax.Array:
    given = (q, k, v, d_out, *rows)
    flops = 6 * call.pairs / call.queries
    (dq,) = _run("attention_d_queries", call, q, k, given, masks, [q], flops=flops, by_keys=False)
    return dq


def _d_keys(call: AttentionCall, q: Any, k: Any, v: Any, d_out: Any, rows: Any, masks: MaskArrays) -> tuple[Any, Any]:
    given = (q, k, v, d_out, *rows)
    flops = 8 * call.pairs * (q.shape[2] // k.shape[2]) / call.keys
    dk, dv = _run("attention_d_keys", call, q, k, given, masks, [k, k], flops=flops, by_keys=True)
    return dk, dv


def _run(
    name: str,
    call: AttentionCall,
    q: Any,
    k: Any,
    arrays: tuple[Any, ...],
    masks: MaskArrays,
    outputs: list[Any],
    *,
    flops: float,
    by_keys: bool,
) -> list[jax.Array]:
    programs = load_programs("jaxmem.kernels.fused_attention.triton_programs")
    unused = jnp.zeros(1, jnp.int32)  # passed for pointers that a program does not read
    extra = [unused if x is None else x for x in masks]
    batch, _, heads, _ = q.shape
    kv_heads = k.shape[2]
    blocks = -(-call.keys // call.blocks.keys) if by_keys else -(-call.queries // call.blocks.queries)
    return launch(
        getattr(programs, name),
        [*arrays, *extra],
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outputs],
        grid=(blocks, kv_heads if by_keys else heads, batch),
        static=static(call, heads, kv_heads, segments=masks.ids is not None),
        warps=call.blocks.warps,
        stages=call.blocks.stages,
        flops=flops,
    )


PASSES = Passes("triton", _forward, d_queries=_d_queries, d_keys=_d_keys)


attend = functools.partial(flash.attend, PASSES)
gradients = functools.partial(flash.gradients, PASSES)
