"""Attention in float64, and what its implementations are held against it with."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem.kernels import attention
from jaxmem.kernels.fused_attention import IMPLEMENTATIONS, blockwise, flash
from jaxmem.kernels.fused_attention.flash import BlockSizes

KEY = jax.random.key(7)
BLOCKS = BlockSizes(queries=64, keys=64, warps=4, stages=1)
# Blockwise has two ways: everything written out, and a loop over tiles. Small tiles make small cases cross many.
WAYS = {
    **{name: {} for name in IMPLEMENTATIONS if name != "cudnn"},  # test_cudnn.py
    "blockwise, small tiles": {"SHORT_BLOCK": 32},
}
TOLERANCE = 2e-5  # in float32

# name: (batch, queries, keys, heads, kv_heads, dim), options
CASES = {
    "full": ((1, 80, 80, 2, 2, 16), {}),
    "grouped": ((1, 64, 64, 6, 2, 8), {"causal": True}),
    "odd lengths": ((1, 71, 71, 2, 1, 8), {"causal": True}),
    "one position": ((2, 1, 1, 2, 2, 8), {"causal": True}),
    "one query, many keys": ((1, 1, 133, 4, 2, 8), {"causal": True}),
    "more queries than keys: the first see nothing": ((1, 90, 40, 2, 1, 8), {"causal": True}),
    "window": ((1, 150, 150, 2, 1, 8), {"causal": True, "window": 37}),
    "window of one": ((1, 70, 70, 2, 2, 8), {"window": 1}),
    "segments": ((2, 100, 100, 2, 1, 8), {"causal": True, "segments": 4}),
    "segments of other lengths, some unseen": ((1, 50, 120, 2, 2, 8), {"segments": 5}),
    "heads of 64": ((1, 20, 20, 2, 1, 64), {"causal": True}),
    "everything": (
        (1, 70, 130, 2, 1, 8),
        {"window": 33, "segments": 3, "soft_cap": 3.0, "scale": 0.5},
    ),
}


def drawn(shape, seed=0, dtype=jnp.float32):
    """q, k, v and the cotangent of the output."""
    batch, queries, keys, heads, kv_heads, dim = shape
    rng = np.random.default_rng(seed)
    sizes = [(batch, queries, heads, dim), *[(batch, keys, kv_heads, dim)] * 2, (batch, queries, heads, dim)]
    return tuple(jnp.asarray(rng.standard_normal(size), dtype) for size in sizes)


def with_segments(shape, options, seed=0):
    """Options with ids drawn, sorted as packing makes them where there are as many keys as queries."""
    options = dict(options)
    count = options.pop("segments", None)
    if count is None:
        return options
    batch, queries, keys = shape[:3]
    rng = np.random.default_rng(seed)
    mine = np.sort(rng.integers(0, count + 1, (batch, queries)), axis=1)
    theirs = mine if keys == queries else rng.integers(0, count, (batch, keys))
    return options | {"segment_ids": jnp.asarray(mine), "kv_segment_ids": jnp.asarray(theirs)}


def exact(
    q,
    k,
    v,
    d_out,
    *,
    causal=False,
    window=None,
    segment_ids=None,
    kv_segment_ids=None,
    scale=None,
    soft_cap=None,
):
    """(output, dq, dk, dv) and the log-sum-exp, in float64 and by hand."""
    kinds = [np.asarray(x, np.float64) for x in (q, k, v, d_out)]
    q, k, v, d_out = kinds
    batch, queries, heads, dim = q.shape
    keys, kv_heads = k.shape[1:3]
    groups = heads // kv_heads
    k, v = np.repeat(k, groups, axis=2), np.repeat(v, groups, axis=2)
    scale = dim**-0.5 if scale is None else scale
    s = np.einsum("bqhd,bkhd->bhqk", q, k) * scale
    bend = np.ones_like(s)
    if soft_cap is not None:
        bend = 1 - np.tanh(s / soft_cap) ** 2
        s = soft_cap * np.tanh(s / soft_cap)
    distance = np.arange(queries)[:, None] + keys - queries - np.arange(keys)
    seen = np.ones((batch, 1, queries, keys), bool)
    if causal or window is not None:
        seen &= distance >= 0
    if window is not None:
        seen &= distance < window
    if segment_ids is not None:
        seen &= (np.asarray(segment_ids)[:, :, None] == np.asarray(kv_segment_ids)[:, None, :])[:, None]
    s = np.where(seen, s, -np.inf)
    top = np.max(s, axis=-1, keepdims=True)
    e = np.exp(s - np.where(np.isinf(top), 0, top))
    total = e.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (top + np.log(total))[..., 0]
    p = e / np.where(total > 0, total, 1)
    out = np.einsum("bhqk,bkhd->bqhd", p, v)
    dv = np.einsum("bhqk,bqhd->bkhd", p, d_out)
    dp = np.einsum("bqhd,bkhd->bhqk", d_out, v)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) * bend * scale
    dq = np.einsum("bhqk,bkhd->bqhd", ds, k)
    dk = np.einsum("bhqk,bqhd->bkhd", ds, q)
    dk, dv = (x.reshape(batch, keys, kv_heads, groups, dim).sum(3) for x in (dk, dv))
    return (out, dq, dk, dv), lse


def run(way, arrays, options):
    """Output, dq, dk, dv of an implementation, compiled."""
    name = way.split(",")[0]
    options = options | {"implementation": name}
    calls = []
    module = importlib.import_module(IMPLEMENTATIONS[name])
    attend = module.attend

    def counted(*args):
        calls.append(name)
        return attend(*args)

    @jax.jit
    def both(q, k, v, d_out):
        out, pull = jax.vjp(lambda q, k, v: attention(q, k, v, **options), q, k, v)
        return (out, *pull(d_out))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "attend", counted)
        for constant, value in WAYS[way].items():
            patch.setattr(blockwise, constant, value)
        for kernel in flash.BLOCKS:
            patch.setitem(flash.BLOCKS, kernel, {(4, 256): BLOCKS})
        results = both(*arrays)
    assert calls == [name]
    return results


def assert_close(got, wanted, tolerance):
    for name, x, y in zip(("out", "dq", "dk", "dv"), got, wanted, strict=True):
        np.testing.assert_allclose(np.asarray(x, np.float64), y, rtol=tolerance, atol=tolerance, err_msg=name)
