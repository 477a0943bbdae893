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

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxmem.kernels.triton_launch import Launch, launch, load_programs, next_power_of_2

from . import flash
from .arguments import Extras, Options, Residuals, pairs
from .flash import LOG2E, BlockSizes


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
    unit: float  # `flash.score_unit`
    base: float  # exponent of 2 / difference of scores

    @classmethod
    def of(cls, options: Options, blocks: BlockSizes, q: jax.Array, k: jax.Array, *, segments: bool) -> AttentionStatic:
        unit = flash.score_unit(options)
        scale = options.scale
        return cls(
            queries=q.shape[1],
            keys=k.shape[1],
            heads=q.shape[2],
            kv_heads=k.shape[2],
            dim=q.shape[3],
            wide=max(16, next_power_of_2(q.shape[3])),
            rows=blocks.queries,
            columns=blocks.keys,
            causal=options.causal or options.window is not None,
            window=options.window,
            segments=segments,
            scale=scale,
            factor=1.0 if unit == scale else scale,
            tanh_factor=None if options.soft_cap is None else 2.0 * LOG2E * scale / options.soft_cap,
            unit=unit,
            base=unit * LOG2E,
        )

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


def attend(q: jax.Array, k: jax.Array, v: jax.Array, options: Options, extras: Extras) -> tuple[jax.Array, jax.Array]:
    rows = jax.ShapeDtypeStruct((q.shape[0], q.shape[2], q.shape[1]), jnp.float32)
    out, lse = _run("forward", options, (q, k, v), extras, (q, rows), 4 / q.shape[1])
    return out, lse


def gradients(saved: Residuals, d_out: jax.Array, options: Options, extras: Extras) -> tuple[jax.Array, ...]:
    q, k, v, *_ = saved
    arrays = q, k, v, d_out, *flash.backward_rows(saved, d_out, options)
    (dq,) = _run("d_queries", options, arrays, extras, (q,), 6 / q.shape[1])
    dk, dv = _run("d_keys", options, arrays, extras, (k, k), 8 * (q.shape[2] // k.shape[2]) / k.shape[1])
    return dq, dk, dv


def _run(
    name: str,
    options: Options,
    arrays: tuple[jax.Array, ...],
    extras: Extras,
    outputs: Sequence[jax.Array | jax.ShapeDtypeStruct],
    flops_per_pair: float,
) -> list[jax.Array]:
    """The outputs of a kernel, a key of `flash.BLOCKS`. `flops_per_pair`: operations per element of its first output,
    for each (query, key) pair that is not masked."""
    q, k, *_ = arrays
    blocks = flash.block_sizes(name, q, k)
    by_keys = name == "d_keys"
    masks = flash.mask_arrays(options, blocks, extras, q, k, by_keys=by_keys)
    unused = jnp.zeros(1, jnp.int32)  # passed for pointers that a program does not read
    heads = k.shape[2] if by_keys else q.shape[2]
    programs = load_programs("jaxmem.kernels.fused_attention.triton_programs")
    return launch(
        getattr(programs, f"attention_{name}"),
        [*arrays, *(unused if x is None else x for x in masks)],
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outputs],
        Launch(
            grid=(masks.ranges.shape[1], heads, q.shape[0]),
            static=AttentionStatic.of(options, blocks, q, k, segments=masks.ids is not None),
            warps=blocks.warps,
            stages=blocks.stages,
            flops=flops_per_pair * pairs(q.shape[1], k.shape[1], causal=options.causal, window=options.window),
        ),
    )
