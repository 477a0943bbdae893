"""Every way to the maximum over a sliding window gives the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec

from scripts.course.sliding_max import HOST, IMPLEMENTATIONS, SHAPES, requested_bytes, sliding_max


@given(st.lists(st.integers(-9, 9).map(float), min_size=1, max_size=30), st.data())
def test_on_one_processor(x, data):
    window = data.draw(st.integers(1, len(x)))
    wanted = np.lib.stride_tricks.sliding_window_view(np.asarray(x), window).max(1).tolist()
    assert {name: run(x, window) for name, run in HOST.items()} == dict.fromkeys(HOST, wanted)


def test_on_a_device():
    """Several programs and a last one that is not full; windows of one, of less and of more than a program has."""
    x = np.random.default_rng(0).standard_normal(1300).astype(np.float32)
    windows = (1, 37, 700)
    run = jax.jit(lambda x: {(i, w): sliding_max(x, w, implementation=i) for i in IMPLEMENTATIONS for w in windows})
    found = run(jnp.asarray(x))
    assert len(found) == 3 * len(windows)
    for (_, window), got in found.items():
        np.testing.assert_array_equal(got, np.lib.stride_tricks.sliding_window_view(x, window).max(1))


@pytest.mark.parametrize("way", IMPLEMENTATIONS)
def test_nan_is_not_hidden(way):
    x = np.random.default_rng(0).standard_normal(60).astype(np.float32)
    x[20], x[33:35], x[50:] = np.nan, (-np.nan, np.inf), -np.inf
    wanted = np.lib.stride_tricks.sliding_window_view(x, 5).max(1)
    got = jax.jit(lambda x: sliding_max(x, 5, implementation=way))(jnp.asarray(x))
    np.testing.assert_array_equal(got, wanted)
    assert np.isnan(got).sum() == 10
    assert np.isneginf(got).any()


def test_each_device_its_own_numbers():
    x = jax.random.normal(jax.random.key(0), (80,))
    mesh, split = Mesh(np.array(jax.devices()[:2]), ("d",)), PartitionSpec("d")
    for way in ("shared", "straight"):
        run = lambda x, way=way: sliding_max(x, 7, implementation=way)  # noqa: E731
        cut = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=split, out_specs=split, check_vma=False))
        wanted = [np.lib.stride_tricks.sliding_window_view(half, 7).max(1) for half in (x[:40], x[40:])]
        np.testing.assert_array_equal(cut(x), np.concatenate(wanted))


def test_bytes_asked():
    assert requested_bytes("straight", 1000, 100) == 4 * 901 * 101
    assert requested_bytes("shared", 10**6, 513) == pytest.approx(4 * 3 * 10**6, rel=0.01)
    for shape in SHAPES.values():
        straight, shared = (requested_bytes(way, *shape) for way in ("straight", "shared"))
        assert shape.least_bytes < shared < 1.3 * shape.least_bytes < straight
