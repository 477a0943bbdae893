"""Numbers drawn from positions: even, independent of each other, and right in the mean where they round."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem.kernels import int8_add
from jaxmem.kernels.draws import scramble, uniform
from jaxmem.kernels.quantized_update import IMPLEMENTATIONS

BLOCKS, SIZE = 4096, 256
DEVIATIONS = 5  # that a sum of so many draws may be from its mean


def drawn(seeds):
    return np.asarray(jax.jit(uniform)(jnp.asarray(seeds, jnp.uint32)[:, None], jnp.arange(SIZE, dtype=jnp.int32)))


def seeds(kind):
    """As steps hand them out, from a word of the step and a block's place; and as badly as possible: in a row, and with
    a single bit set or two."""
    count = np.arange(BLOCKS, dtype=np.uint32)
    if kind == "in a row":
        return count
    if kind == "single bits":
        return (np.uint32(1) << (count // 64 % 32)) ^ (np.uint32(1) << (count % 32))
    return np.asarray(scramble(jnp.asarray(count) ^ jnp.uint32(0x1234567 if kind == "a step" else 0x1234568)))


def even(*draws, parts):
    """That of so many parts for each, and all combinations, none has more than the others: by chi-squared."""
    cells = sum((x.reshape(-1) * parts).astype(int) * parts**i for i, x in enumerate(draws))
    found = np.bincount(cells, minlength=parts ** len(draws))
    expected, free = cells.size / found.size, found.size - 1
    assert abs(((found - expected) ** 2 / expected).sum() - free) < DEVIATIONS * np.sqrt(2 * free)


@pytest.mark.parametrize("kind", ["a step", "in a row"])
def test_draws_are_even(kind):
    x = drawn(seeds(kind))
    wanted = (np.arange(2**16) + 0.5) / 2**16
    assert x.dtype == np.float32
    assert np.isin(x, wanted).all()
    even(x, parts=4096)
    for half in (x[:, ::2], x[:, 1::2]):
        even(half, parts=1024)
        lowest = half * 2**16 % 64 / 64  # the six last bits
        even(lowest, parts=64)


@pytest.mark.parametrize("kind", ["a step", "in a row"])
def test_draws_know_nothing_of_each_other(kind):
    """Of the other half of a word, of the next words, of other blocks at the same place and at others."""
    x = drawn(seeds(kind))
    even(x[:, ::2], x[:, 1::2], parts=32)
    for away in (1, 2, 3, 32, 128):
        even(x[:, :-away], x[:, away:], parts=32)
    for away in (1, 2, 64, 1024):
        even(x[:-away], x[away:], parts=32)
        even(x[:-away, :-1], x[away:, 1:], parts=32)
    even(x[:, :-2], x[:, 1:-1], x[:, 2:], parts=8)
    even(x[:-2], x[1:-1], x[2:], parts=8)


def test_steps_know_nothing_of_each_other():
    one, other = drawn(seeds("a step")), drawn(seeds("the next step"))
    even(one, other, parts=32)
    even(one[:, :-1], other[:, 1:], parts=32)


def test_seeds_of_a_bit_or_two_draw_evenly():
    unlike = np.unique(seeds("single bits"))
    x = drawn(unlike)
    even(x, parts=64)
    few = np.unique((x * 2**16).astype(int)).size  # of so many draws, if they are even
    assert abs(few - 2**16 * (1 - np.exp(-x.size / 2**16))) < DEVIATIONS * np.sqrt(2**16)


def test_a_number_is_right_in_the_mean():
    """Over all that can be drawn, to half of their distance; a whole number always."""
    draws = (np.arange(2**16) + 0.5) / 2**16
    for part in [0.0, 2.0**-18, 2.0**-16, 0.1, 1 / 3, 0.5, 0.77777, 1 - 2.0**-16]:
        assert abs(np.floor(part + draws).mean() - part) <= 2.0**-17
    assert np.floor(draws.astype(np.float32) + np.float32(127)).max() == 127


@pytest.mark.parametrize("way", IMPLEMENTATIONS)
def test_weights_move_by_the_update_in_the_mean(way):
    """By a thousandth of a step to 0.999 of it: many roundings of the same weights, the mean of each and of all."""
    times, rows = 400, 4
    rng = np.random.default_rng(0)
    codes = rng.integers(-120, 121, (rows, SIZE)).astype(np.int8)
    codes[:, 0] = 127  # what nothing is added to, so that a step is a whole number
    update = rng.choice([0.001, -0.01, 0.25, 0.5, -0.75, 0.999], (rows, SIZE)).astype(np.float32)
    update[:, 0] = 0
    scale = jnp.full((times * rows, 1), 127.0)
    words = jax.random.bits(jax.random.key(0), (times * rows, 1), jnp.uint32)
    add = jax.jit(lambda *a: int8_add(*a, axis=-1, implementation=way))
    new, most = add(np.tile(codes, (times, 1)), scale, np.tile(update, (times, 1)), words)
    np.testing.assert_allclose(most, 127.0, rtol=1e-6)
    moved = np.asarray(new, np.float64).reshape(times, rows, SIZE) - codes
    assert set(np.unique(moved)) <= {-1, 0, 1}
    assert np.all(moved[..., 0] == 0)
    up = np.abs(update) * (1 - np.abs(update))  # the variance of one rounding
    wrong = moved.mean(0) - update
    assert np.all(np.abs(wrong) <= DEVIATIONS * np.sqrt(up / times) + 1 / times)
    assert abs(wrong.sum()) < DEVIATIONS * np.sqrt(up.sum() / times)
