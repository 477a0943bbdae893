"""Every way to the maximum over a sliding window gives the same."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmem.kernels import sliding_max
from jaxmem.kernels.sliding_max import HOST, IMPLEMENTATIONS, pallas


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


def test_bytes_asked():
    assert pallas.bytes_asked("straight", 1000, 100) == 4 * 901 * 101
    assert pallas.bytes_asked("shared", 10**6, 513) == pytest.approx(4 * 3 * 10**6, rel=0.01)


@pytest.mark.parametrize(
    ("x", "window", "message"),
    [
        (jnp.zeros((2, 3), jnp.float32), 1, "x is float32 of shape (2, 3); it should be float32 of one dimension"),
        (jnp.zeros(3, jnp.int32), 1, "x is int32 of shape (3,)"),
        (jnp.zeros(3, jnp.float32), 0, "window is 0; it should be from 1 to the 3 numbers of x"),
        (jnp.zeros(3, jnp.float32), 4, "window is 4; it should be from 1 to the 3 numbers of x"),
    ],
)
def test_mistakes_are_named(x, window, message):
    with pytest.raises(ValueError, match=re.escape(f"sliding_max: {message}")):
        sliding_max(x, window)
