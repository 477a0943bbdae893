"""Attention as Triton kernels, launched through jax-triton: NVIDIA GPUs from Ampere on.

In the forward pass (Dao, arXiv:2307.08691) a program has a block of queries, and visits the keys of these queries block
by block, with a running maximum and sum of each row. Blocks of keys without masked elements are computed without a
mask; blocks without a key of the queries' segments are skipped. The backward pass has two kernels without atomic
additions, so equal inputs have bitwise equal gradients: one has a block of queries and sums dq, the other has a block
of keys and sums dk and dv over the queries of all heads that share them. Both recompute the probabilities from the
log-sum-exp.

In addition to inputs and outputs they store batch x heads x sequence x 2 values, never sequence squared. With P
unmasked pairs they need 4 P dim operations per head forward, and 14 P dim backward: 10, plus 4 because both kernels
compute the scores and their gradients.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem.kernels.triton_launch import Launch, launch, load_programs
from jaxmem.kernels.typing import Tree

from . import flash
from .arguments import Extras, Options, Residuals
from .flash import LOG2E, AttentionCall


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


def attend(q: Any, k: Any, v: Any, options: Options, extras: Extras) -> tuple[jax.Array, jax.Array]:
    call = flash.call_for("forward", options, q, k)
    rows = jax.ShapeDtypeStruct((q.shape[0], q.shape[2], q.shape[1]), jnp.float32)
    out, lse = _run("attention_forward", call, (q, k, v), extras, (q, rows), 4 * call.pairs / call.queries)
    return out, lse


def gradients(saved: Residuals, d_out: Tree, options: Options, extras: Extras) -> tuple[jax.Array, ...]:
    q, k, v, *_ = saved
    arrays = q, k, v, d_out, *flash.backward_rows(saved, d_out, options)
    call = flash.call_for("d_queries", options, q, k)
    (dq,) = _run("attention_d_queries", call, arrays, extras, (q,), 6 * call.pairs / call.queries)
    call = flash.call_for("d_keys", options, q, k)
    flops = 8 * call.pairs * (q.shape[2] // k.shape[2]) / call.keys
    dk, dv = _run("attention_d_keys", call, arrays, extras, (k, k), flops)
    return dq, dk, dv


def _run(
    name: str, call: AttentionCall, arrays: tuple[Tree, ...], extras: Extras, outputs: tuple[Tree, ...], flops: float
) -> list[jax.Array]:
    programs = load_programs("jaxmem.kernels.fused_attention.triton_programs")
    by_keys = name == "attention_d_keys"
    batch, _, heads, _ = arrays[0].shape
    kv_heads = arrays[1].shape[2]
    masks = flash.mask_arrays(call, extras, batch, by_keys=by_keys)
    unused = jnp.zeros(1, jnp.int32)  # passed for pointers that a program does not read
    return launch(
        getattr(programs, name),
        [*arrays, *(unused if x is None else x for x in masks)],
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outputs],
        Launch(
            grid=(masks.ranges.shape[1], kv_heads if by_keys else heads, batch),
            static=static(call, heads, kv_heads, segments=masks.ids is not None),
            warps=call.blocks.warps,
            stages=call.blocks.stages,
            flops=flops,
        ),
    )
