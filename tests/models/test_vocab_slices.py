"""Slices of a vocabulary: their entries, the positions of token ids in them, and weights initialized in slices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem.config.sections import Precision
from jaxmem.models import vocab_slices
from jaxmem.models.vocab_slices import VocabSlices
from jaxmem.sharding.weights import Storage, store


@pytest.mark.exhaustive
def test_a_slice_is_read_and_written_at_its_entries():
    """Of a vocabulary in two parts, and of scales that each belong to two entries."""
    slices = VocabSlices(vocab=24, width=4, stored_parts=2)
    table, constants = jnp.arange(24.0)[:, None] * jnp.ones(3), jnp.arange(12)[None]
    ids = jnp.arange(24, dtype=jnp.int32)
    seen = np.zeros(24, bool)
    for j in map(jnp.asarray, range(slices.count)):
        entries = np.ravel(slices.entries(j))
        seen[entries] = True
        rows = slices.read(table, 0, j)
        np.testing.assert_array_equal(rows[:, 0], entries)
        np.testing.assert_array_equal(np.ravel(slices.read(constants, 1, j)), entries[::2] // 2)
        places = np.asarray(slices.positions(ids, j))
        np.testing.assert_array_equal(places[entries], np.arange(slices.size))
        assert np.all(np.delete(places, entries) == slices.size)
        table = slices.write(table, 0, j, -rows)
    assert seen.all()
    np.testing.assert_array_equal(table[:, 2], -np.arange(24.0))


def test_slices_of_a_large_vocabulary():
    """The square of the vocabulary of Llama 3 exceeds 32 bits."""
    slices = VocabSlices(vocab=128256, width=2048)
    table = jnp.arange(slices.vocab, dtype=jnp.int32)

    def moved(j):
        return slices.read(table, 0, j), slices.entries(j)[0], slices.write(table, 0, j, -slices.read(table, 0, j))

    for j in (9, slices.count - 1):
        rows, entries, written = jax.jit(moved)(jnp.int32(j))
        first = min(j * slices.width, slices.vocab - slices.width)
        np.testing.assert_array_equal(rows, np.arange(first, first + slices.width))
        np.testing.assert_array_equal(np.flatnonzero(written < 0), rows)
        np.testing.assert_array_equal(entries[entries >= 0], rows[entries >= 0])


@pytest.mark.exhaustive
@pytest.mark.parametrize(("shape", "axes"), [((32, 64), ("embed", "vocab")), ((64, 32), ("vocab", "embed"))])
def test_a_large_matrix_is_initialized_in_slices(shape, axes, monkeypatch):
    """And stored as the whole would be. A small one is drawn whole."""
    key = jax.random.key(0)

    def drawn(key, shape):
        return jax.random.normal(key, shape, jnp.float32)

    def stored(key, shape):
        return store(drawn(key, shape), axes, Storage(Precision(parameters="int8")))

    np.testing.assert_array_equal(vocab_slices.initialize_in_slices(drawn, key, shape, axes), drawn(key, shape))
    monkeypatch.setattr(vocab_slices, "SLICE_SIZE", 512)
    whole, codes = (vocab_slices.initialize_in_slices(draw, key, shape, axes) for draw in (drawn, stored))
    assert len(np.unique(whole)) == 32 * 64  # no part is another one's
    assert float(jnp.mean(whole)) == pytest.approx(0.0, abs=0.1)
    assert float(jnp.std(whole)) == pytest.approx(1.0, abs=0.1)
    expected = store(whole, axes, Storage(Precision(parameters="int8")))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), codes, expected)
