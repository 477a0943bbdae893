"""Rotary positions against the definition, and the ways to stretch them against their papers' formulas."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem.config import Rope
from jaxmem.models.rope import angles, document_lengths, frequencies, rotate


def test_plain_frequencies_are_powers_of_theta():
    radians, factor = frequencies(Rope(theta=10_000.0), 8)
    np.testing.assert_allclose(radians, [1.0, 0.1, 0.01, 0.001], rtol=1e-12)
    assert factor == 1.0


def test_rotation_depends_only_on_distance():
    rope = Rope()
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 16))

    def score(at_q, at_k):
        place = lambda x, at: rotate(x, angles(jnp.full((1, 1), at, jnp.int32), rope, 16))  # noqa: E731
        return float(jnp.sum(place(q, at_q) * place(k, at_k)))

    assert score(5, 2) == pytest.approx(score(105, 102), abs=1e-4)
    assert score(5, 2) != pytest.approx(score(5, 3), abs=1e-3)


def test_llama3_keeps_high_and_stretches_low_frequencies():
    rope = Rope(theta=500_000.0, scaling="llama3", factor=8.0, original_length=8192)
    stretched, _ = frequencies(rope, 128)
    plain, _ = frequencies(Rope(theta=500_000.0), 128)
    wavelength = 2 * math.pi / plain
    np.testing.assert_allclose(stretched[wavelength < 8192 / 4], plain[wavelength < 8192 / 4])
    np.testing.assert_allclose(stretched[wavelength > 8192], plain[wavelength > 8192] / 8)
    middle = (wavelength > 8192 / 4) & (wavelength < 8192)
    smooth = (8192 / wavelength[middle] - 1.0) / (4.0 - 1.0)
    expected = (1 - smooth) * plain[middle] / 8 + smooth * plain[middle]
    np.testing.assert_allclose(stretched[middle], expected)
    assert middle.any()


def test_linear_divides_all():
    np.testing.assert_allclose(
        frequencies(Rope(scaling="linear", factor=4.0), 16)[0] * 4, frequencies(Rope(), 16)[0], rtol=1e-12
    )


def test_yarn_blends_and_sharpens():
    rope = Rope(theta=10_000.0, scaling="yarn", factor=4.0, original_length=4096)
    stretched, factor = frequencies(rope, 64)
    plain, _ = frequencies(Rope(theta=10_000.0), 64)
    assert factor == pytest.approx(0.1 * math.log(4.0) + 1.0)
    turns = 4096 * plain / (2 * math.pi)
    np.testing.assert_allclose(stretched[turns > 64], plain[turns > 64])  # well above beta_fast
    np.testing.assert_allclose(stretched[turns < 0.5], plain[turns < 0.5] / 4)  # well below beta_slow
    assert np.all(np.diff(stretched) < 0)


@pytest.mark.exhaustive
def test_the_length_of_each_document_chooses_the_factors_of_longrope():
    factors = {"short_factors": (1.0, 2.0), "long_factors": (4.0, 8.0)}
    rope = Rope(scaling="longrope", original_length=4, attention_factor=1.0, **factors)
    lengths = (5, 4, 2)  # documents of both rows; the last is padding
    segments = np.repeat([1, 2, 0], lengths)
    positions = jnp.asarray(np.concatenate([np.arange(length) for length in lengths]), jnp.int32)
    order = np.random.default_rng(0).permutation(len(segments))  # a sequence may be stored in another order
    rows, ids = jnp.stack([positions, positions[order]]), jnp.asarray(np.stack([segments, segments[order]]), jnp.int32)
    turned = angles(rows, rope, 4, document_lengths(rows, ids))
    phase = np.asarray(positions)[:, None] * [1.0, 0.01] / np.where(segments[:, None] == 1, [4.0, 8.0], [1.0, 2.0])
    np.testing.assert_allclose(turned.cos, np.cos([phase, phase[order]]), rtol=1e-6)
