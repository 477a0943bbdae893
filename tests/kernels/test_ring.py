"""Attention over a split time: the same as of the whole sequence, in values and gradients, and what is sent."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxmem.kernels import attention
from jaxmem.kernels.fused_attention import ring

DEVICES, TIME = 4, 64
SPLIT = P(None, "c")


def mapped(function, *, segments):
    mesh = Mesh(np.array(jax.devices()[:DEVICES]), ("c",))
    specs = (SPLIT, SPLIT, SPLIT, SPLIT if segments else None)
    return jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=SPLIT, check_vma=False)


def around(q, k, v, ids, window=None, soft_cap=None):
    """Over a ring, or with a window by halos; arguments and result in the usual order of time."""
    order = ring.places(TIME, DEVICES) if window is None else np.arange(TIME)

    def local(q, k, v, ids):
        options = {"axis": "c", "segment_ids": ids, "soft_cap": soft_cap}
        if window is None:
            return ring.ring(q, k, v, **options)
        return ring.halo(attention, q, k, v, window=window, **options)

    split = (x if x is None else x[:, order] for x in (q, k, v, ids))
    return mapped(local, segments=ids is not None)(*split)[:, np.argsort(order)]


@pytest.fixture(scope="module")
def arrays():
    keys = jax.random.split(jax.random.key(0), 4)
    return [jax.random.normal(key, (2, TIME, heads, 8)) for key, heads in zip(keys, (4, 2, 2, 4), strict=True)]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("window", [None, 1, 20, 37, 1000])
def test_it_is_attention(arrays, window, packed):
    q, k, v, cotangent = arrays
    documents = np.sort(np.random.default_rng(0).integers(-1, 3, (2, TIME)), axis=1)
    ids = jnp.asarray(documents, jnp.int32) if packed else None

    @jax.jit
    def whole(q, k, v):
        return attention(q, k, v, causal=True, window=window, segment_ids=ids, soft_cap=2.0, implementation="reference")

    @jax.jit
    def split(q, k, v):
        return around(q, k, v, ids, window, soft_cap=2.0)

    wanted, back = jax.vjp(whole, q, k, v)
    got, split_back = jax.vjp(split, q, k, v)
    for one, other in zip((got, *split_back(cotangent)), (wanted, *back(cotangent)), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_every_device_has_the_same_work():
    """Pairs that see each other, counted for each device's queries against each device's keys."""
    order = ring.places(TIME, DEVICES).reshape(DEVICES, -1)
    assert sorted(order.reshape(-1).tolist()) == list(range(TIME))
    seen = order[:, None, :, None] >= order[None, :, None, :]
    work = seen.sum((2, 3))
    assert len({int(work[i, j]) for i in range(DEVICES) for j in range(DEVICES) if i != j}) == 1


def test_places_that_do_not_divide():
    with pytest.raises(ValueError, match="12 positions do not make 2 chunks for each of 4 devices"):
        ring.places(12, 4)


def test_no_device_holds_all_keys():
    """The backward pass saves one device's part, however many there are."""
    q = jax.ShapeDtypeStruct((1, 2048, 4, 8), jnp.float32)

    def saved(function):
        return sum(x.size for x in jax.tree.leaves(jax.eval_shape(lambda *a: jax.vjp(function, *a)[1], q, q, q)))

    run = mapped(lambda q, k, v, _: ring.ring(q, k, v, axis="c"), segments=False)
    whole = saved(lambda q, k, v: attention(q, k, v, causal=True))
    assert saved(lambda q, k, v: run(q, k, v, None)) <= whole
