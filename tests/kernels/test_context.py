"""Attention of a sequence sharded over devices: the same as on one device, in values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxmem.kernels import attention
from jaxmem.kernels.fused_attention import context, cudnn, ring
from tests.kernels.test_cudnn import emulated
from tests.support.tiers import exhaustive

DEVICES, TIME = 4, 64
SHARDED = P(None, "c")


def mapped(function, *, segments):
    mesh = Mesh(np.array(jax.devices()[:DEVICES]), ("c",))
    specs = (SHARDED, SHARDED, SHARDED, SHARDED if segments else None)
    return jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=SHARDED, check_vma=False)


def over_context(method, q, k, v, ids, implementation="blockwise", **options):
    """Arguments and result are in the usual order of positions."""
    in_order = method == "ulysses" or "window" in options
    order = np.arange(TIME) if in_order else ring.places(TIME, DEVICES)

    def local(q, k, v, ids):
        return context.attention_over(
            "c", method, q, k, v, implementation=implementation, segment_ids=ids, max_segments=4, **options
        )

    permuted = (x if x is None else x[:, order] for x in (q, k, v, ids))
    return mapped(local, segments=ids is not None)(*permuted)[:, np.argsort(order)]


def drawn(heads, kv_heads, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 4)
    return [
        jax.random.normal(key, (2, TIME, n, 8), dtype)
        for key, n in zip(keys, (heads, kv_heads, kv_heads, heads), strict=True)
    ]


def documents():
    return jnp.asarray(np.sort(np.random.default_rng(0).integers(-1, 3, (2, TIME)), axis=1), jnp.int32)


def check(method, arrays, ids, atol=1e-5, **options):
    """Compares values and gradients with those of one device."""
    q, k, v, cotangent = arrays
    shared = {name: value for name, value in options.items() if name != "implementation"}

    @jax.jit
    def whole(q, k, v):
        return attention(q, k, v, causal=True, segment_ids=ids, implementation="reference", **shared)

    @jax.jit
    def sharded(q, k, v):
        return over_context(method, q, k, v, ids, **options)

    wanted, back = jax.vjp(whole, q, k, v)
    got, sharded_back = jax.vjp(sharded, q, k, v)
    for one, other in zip((got, *sharded_back(cotangent)), (wanted, *back(cotangent)), strict=True):
        np.testing.assert_allclose(np.float32(one), np.float32(other), atol=atol)


@pytest.mark.parametrize(
    ("method", "window", "packed"),
    [
        exhaustive("ring", None, True),
        exhaustive("ring", 1, False),
        ("ring", 20, False),
        exhaustive("ring", 37, True),
        exhaustive("ring", 1000, False),
        ("ulysses", None, False),
        exhaustive("ulysses", 20, True),
    ],
)
def test_it_is_attention(method, window, packed):
    options = {} if window is None else {"window": window}
    check(method, drawn(4, 2), documents() if packed else None, soft_cap=2.0, **options)


def test_with_a_window_devices_wait_for_their_neighbors_only():
    traced = str(
        jax.make_jaxpr(lambda *arrays: over_context("ring", *arrays, documents(), window=20))(*drawn(4, 2)[:3])
    )
    assert "ppermute" in traced
    assert not any(name in traced for name in ("pmin", "pmax", "psum", "all_gather", "all_to_all"))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("heads", "kv_heads"), [(12, 3), (4, 1)])
def test_ulysses_repeats_kv_heads_that_are_fewer_than_devices(heads, kv_heads):
    check("ulysses", drawn(heads, kv_heads), documents())


@pytest.mark.exhaustive
@pytest.mark.parametrize(("method", "packed"), [("ring", False), ("ulysses", True)])
def test_cudnn_computes_blocks_of_keys_and_shares_of_heads(method, packed, monkeypatch):
    """The gradients of a block of keys come from the output and the log-sum-exp of all keys."""
    monkeypatch.setattr(cudnn, "ON_CPU", emulated)
    arrays = drawn(8, 4, jnp.float16)
    check(method, arrays, documents() if packed else None, atol=1e-2, implementation="cudnn")


def test_cudnn_does_not_support_documents_of_other_devices():
    with pytest.raises(ValueError, match="cudnn implementation supports the ids of the queries only"):
        over_context("ring", *drawn(4, 2, jnp.float16)[:3], documents(), implementation="cudnn")


def test_every_device_has_the_same_work():
    """Pairs that see each other, counted for each device's queries against each device's keys."""
    order = ring.places(TIME, DEVICES).reshape(DEVICES, -1)
    assert sorted(order.reshape(-1).tolist()) == list(range(TIME))
    seen = order[:, None, :, None] >= order[None, :, None, :]
    work = seen.sum((2, 3))
    assert len({int(work[i, j]) for i in range(DEVICES) for j in range(DEVICES) if i != j}) == 1


def test_places_that_do_not_divide():
    with pytest.raises(ValueError, match="a sequence of 12 is not divisible into 2 chunks for each of 4 devices"):
        ring.places(12, 4)


@pytest.mark.parametrize("method", context.METHODS)
def test_the_backward_pass_saves_one_devices_part(method):
    q = jax.ShapeDtypeStruct((1, 2048, 4, 8), jnp.float32)

    def saved(function):
        return sum(x.size for x in jax.tree.leaves(jax.eval_shape(lambda *a: jax.vjp(function, *a)[1], q, q, q)))

    run = mapped(
        lambda q, k, v, _: context.attention_over("c", method, q, k, v, implementation="blockwise"), segments=False
    )
    whole = saved(lambda q, k, v: attention(q, k, v, causal=True))
    assert saved(lambda q, k, v: run(q, k, v, None)) <= whole
