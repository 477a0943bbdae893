"""Calls that nobody thought of: sizes and options as hypothesis draws them, each implementation against the reference,
which the other files hold against float64. Attention's are in its own file."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmem.kernels import Moments8, adam8_update, int8_add
from jaxmem.kernels.codes import dynamic_code

EXAMPLES = 2  # each compiles two programs or three
SIZES = st.integers(1, 40)


def normal(rng, *shape):
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)


def blocks(data):
    """Shape, axis, block size, and the shape of what there is for each block."""
    axis, size = data.draw(st.sampled_from([-1, -2])), data.draw(SIZES)
    shape = [data.draw(st.integers(1, 3)), data.draw(st.integers(1, 20)), data.draw(st.integers(1, 20))]
    shape[axis] = size * data.draw(st.integers(1, 3))
    lines = list(shape)
    lines[axis] //= size
    return tuple(shape), axis, size, tuple(lines)


@settings(max_examples=EXAMPLES)
@given(st.data())
def test_adam8_update(data):
    """Codes may be each other's neighbours, where a number lies between them: what they stand for is compared."""
    shape, axis, size, lines = blocks(data)
    rng = np.random.default_rng(data.draw(st.integers(0, 9)))
    m, v = (jnp.asarray(rng.integers(low, 256, shape).astype("uint8")) for low in (0, 1))
    scales = (jnp.asarray(rng.random(lines) + 0.1, jnp.float32) for _ in range(2))
    unbiased = jnp.asarray(1 - np.array([0.9, 0.95]) ** data.draw(st.integers(1, 9)), jnp.float32)

    def run(way):
        def update(g, state):
            options = {"axis": axis, "block_size": size, "implementation": way}
            u, new = adam8_update(g, state, unbiased, **options)
            listed = [jnp.asarray(dynamic_code(8, signed=signed), jnp.float32) for signed in (True, False)]
            return u, new.m_scale, new.v_scale, listed[0][new.m], listed[1][new.v]

        return update

    arrays = normal(rng, *shape), Moments8(m, v, *scales)
    found = {way: jax.jit(run(way))(*arrays) for way in ("triton", "reference")}
    for place, (one, other) in enumerate(zip(*found.values(), strict=True)):
        step = 0.008 if place > 2 else 2e-5  # of 1, between the largest codes
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=step)


@settings(max_examples=EXAMPLES)
@given(st.data())
def test_int8_add(data):
    shape, axis, size, lines = blocks(data)
    rng = np.random.default_rng(data.draw(st.integers(0, 9)))
    codes = jnp.asarray(rng.integers(-127, 128, shape).astype("int8"))
    scale, seeds = jnp.asarray(rng.random(lines), jnp.float32), jnp.asarray(rng.integers(0, 2**32, lines), jnp.uint32)
    run = lambda way: lambda *a: int8_add(*a, axis=axis, block_size=size, implementation=way)  # noqa: E731
    arrays = codes, scale, 0.1 * normal(rng, *shape), seeds
    found = {way: jax.jit(run(way))(*arrays) for way in ("triton", "reference")}
    (one, one_scale), (other, other_scale) = found.values()
    np.testing.assert_allclose(one_scale, other_scale, rtol=1e-6)
    apart = np.abs(np.asarray(one, int) - np.asarray(other, int))
    assert apart.max(initial=0) <= 1  # where the draw is just what decides
    assert apart.mean() < 0.01
