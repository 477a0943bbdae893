"""Attention with sinks: equal to a softmax with one more column, in values and gradients, for every implementation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem.kernels import attention
from jaxmem.kernels.fused_attention import IMPLEMENTATIONS, cudnn
from tests.kernels.exact import TOLERANCE, drawn
from tests.kernels.test_context import DEVICES, TIME, over_context
from tests.kernels.test_cudnn import emulated
from tests.support.tiers import cases

IDS = jnp.asarray(np.repeat([[1, 2, 3]], [15, 20, 5], axis=1).repeat(2, 0))
SINKS = jnp.asarray([-1.0, 0.0, 3.0, 9.0])


def defined(q, k, v, sinks, window, ids):
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[3] ** -0.5
    distance = jnp.arange(q.shape[1])[:, None] - jnp.arange(k.shape[1])
    seen = (distance >= 0) & (distance < window)
    seen = seen if ids is None else seen & (ids[:, :, None] == ids[:, None])[:, None]
    column = jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:3], 1))
    p = jax.nn.softmax(jnp.concatenate([jnp.where(seen, scores, -jnp.inf), column], axis=-1), axis=-1)
    return jnp.einsum("bhqk,bkhd->bqhd", p[..., :-1], v)


def check(run, arrays, window, ids, tolerance):
    *inputs, d_out = arrays
    found, pull = jax.vjp(jax.jit(run), *inputs, SINKS)
    wanted, exact_pull = jax.vjp(jax.jit(lambda *x: defined(*x, window, ids)), *inputs, SINKS)
    pairs = zip((found, *pull(d_out)), (wanted, *exact_pull(d_out.astype(jnp.float32))), strict=True)
    for one, other in pairs:
        np.testing.assert_allclose(np.float32(one), np.float32(other), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("way", "window", "has_window"),
    cases(
        [*[(way, None, None) for way in IMPLEMENTATIONS], ("blockwise", 9, True), ("reference", 9, False)],
        ("triton", None, None),
        ("cudnn", None, None),
        ("blockwise", 9, True),
    ),
)
def test_a_softmax_with_one_more_column(way, window, has_window, monkeypatch):
    monkeypatch.setattr(cudnn, "ON_CPU", emulated)
    dtype, tolerance = ("float16", 4e-3) if way == "cudnn" else ("float32", TOLERANCE)
    packed = way != "cudnn" or window is None
    options = {"segment_ids": IDS, "max_segments": 4} if packed else {}
    options |= {} if window is None else {"window": window, "has_window": jnp.asarray(has_window)}

    def run(q, k, v, sinks):
        return attention(q, k, v, causal=True, sinks=sinks, implementation=way, **options)

    arrays = drawn((2, 40, 40, 4, 2, 8), dtype=dtype)
    check(run, arrays, window if has_window else 100, IDS if packed else None, 8 * tolerance)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("method", "window"), [("ulysses", None), ("ring", 20)])
def test_over_devices_of_a_sequence(method, window):
    ids = jnp.repeat(jnp.arange(4, dtype=jnp.int32), TIME // 4)[None].repeat(2, 0)
    options = {} if window is None else {"window": window}
    arrays = drawn((2, TIME, TIME, DEVICES, 2, 8))

    def run(q, k, v, sinks):
        return over_context(method, q, k, v, ids, sinks=sinks, **options)

    check(run, arrays, window or TIME, ids, 2e-4)


def test_a_ring_does_not_support_sinks():
    q, k, v, *_ = drawn((1, TIME, TIME, DEVICES, 2, 8))
    with pytest.raises(ValueError, match="use ulysses"):
        over_context("ring", q, k, v, None, sinks=SINKS)


def test_one_sink_per_head():
    q, k, v, *_ = drawn((1, 8, 8, 4, 2, 8))
    with pytest.raises(ValueError, match=r"shape \[4\]"):
        attention(q, k, v, sinks=SINKS[:2])
