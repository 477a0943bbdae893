"""Slices of a table: which entries they are, where tokens find themselves in them, and tables made some at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem.config.sections import Precision
from jaxmem.models import vocab_slices
from jaxmem.models.vocab_slices import Slices
from jaxmem.sharding.storage import Storage, store


def test_a_slice_is_read_and_written_where_its_entries_are():
    """Of a vocabulary in two parts, and of constants that each stand for two entries."""
    slices = Slices(vocab=24, width=4, resting=2)
    table, constants = jnp.arange(24.0)[:, None] * jnp.ones(3), jnp.arange(12)[None]
    ids = jnp.arange(24, dtype=jnp.int32)
    seen = np.zeros(24, bool)
    for j in map(jnp.asarray, range(slices.count)):
        entries = np.ravel(slices.entries(j))
        seen[entries] = True
        rows = slices.read(table, 0, j)
        np.testing.assert_array_equal(rows[:, 0], entries)
        np.testing.assert_array_equal(np.ravel(slices.read(constants, 1, j)), entries[::2] // 2)
        places = np.asarray(slices.places(ids, j))
        np.testing.assert_array_equal(places[entries], np.arange(slices.size))
        assert np.all(np.delete(places, entries) == slices.size)
        table = slices.written(table, 0, j, -rows)
    assert seen.all()
    np.testing.assert_array_equal(table[:, 2], -np.arange(24.0))


@pytest.mark.parametrize(("shape", "axes"), [((32, 64), ("embed", "vocab")), ((64, 32), ("vocab", "embed"))])
def test_a_large_table_is_made_some_entries_at_a_time(shape, axes, monkeypatch):
    """And is brought to rest as the whole would be. A small one has the values that it always had."""
    key = jax.random.key(0)

    def drawn(key, shape):
        return jax.random.normal(key, shape, jnp.float32)

    def resting(key, shape):
        return store(drawn(key, shape), axes, Storage(Precision(parameters="int8")))

    np.testing.assert_array_equal(vocab_slices.made(drawn, key, shape, axes), drawn(key, shape))
    monkeypatch.setattr(vocab_slices, "NUMBERS", 512)
    whole, codes = (vocab_slices.made(draw, key, shape, axes) for draw in (drawn, resting))
    assert len(np.unique(whole)) == 32 * 64  # no part is another one's
    assert float(jnp.mean(whole)) == pytest.approx(0.0, abs=0.1)
    assert float(jnp.std(whole)) == pytest.approx(1.0, abs=0.1)
    expected = store(whole, axes, Storage(Precision(parameters="int8")))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), codes, expected)
