"""The stop of shardings: each layout computes what one device does, and its blocks cover each array."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem.config import load_config
from jaxmem.sharding.layout import layout_for
from scripts.course import common, shardings
from scripts.course.shardings import CASES, _blocks, _numbers, step


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in (("ROWS", 16), ("COLUMNS", 32), ("TOKENS", 64)):
        monkeypatch.setattr(shardings, name, size)


def layout_of(name: str) -> Any:
    cfg = load_config(common.CONFIGS["shardings"]["base"], CASES[name].overrides)
    return layout_for(cfg, jax.devices()[: shardings.GPUS])


@pytest.mark.parametrize("name", CASES)
def test_a_layout_changes_where_arrays_are_and_not_their_values(name: str) -> None:
    draws = np.random.default_rng(0)
    weight, moment, x = (draws.standard_normal(shape).astype(np.float32) for shape in ((16, 32), (16, 32), (64, 16)))
    layout, case = layout_of(name), CASES[name]
    places = shardings.shardings(layout, case)
    arguments = [
        jax.device_put(array, places[part][0])
        for array, part in ((weight, "weight"), (moment, "optimizer state"), (x, "input"))
    ]
    found = step(layout, case)(*arguments)
    gradient = jax.grad(lambda w: jnp.sum((x @ w) ** 2))(weight)
    new_moment = 0.9 * moment + gradient
    np.testing.assert_allclose(found[1], new_moment, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(found[0], weight - new_moment, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name", CASES)
def test_blocks_cover_an_array_and_every_device_has_one(name: str) -> None:
    for part, (place, shape) in shardings.shardings(layout_of(name), CASES[name]).items():
        blocks = _blocks(part, place, shape, titled=True).blocks
        assert sum(rows * columns for _, _, rows, columns in blocks) == shape[0] * shape[1]


def test_stages_of_zero_shard_one_more_array_each() -> None:
    replicated = {
        name: [
            part
            for part, (place, _) in shardings.shardings(layout_of(name), CASES[name]).items()
            if place.is_fully_replicated
        ]
        for name in list(CASES)[:4]
    }
    assert [len(parts) for parts in replicated.values()] == [3, 2, 1, 0]


def test_numbers_of_devices() -> None:
    assert [_numbers(devices) for devices in ([3], [0, 1], [0, 4], [0, 1, 2, 3])] == ["3", "0 1", "0 4", "0-3"]
