"""Which implementation runs where none is named: the nearest winner, the portable one where that cannot."""

from __future__ import annotations

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxmem.kernels import attention, choice, cross_entropy, dequant_matmul, rms_norm
from jaxmem.kernels.choice import choices, supplied
from jaxmem.kernels.rms_norm import pallas

HERE = jax.devices()[0].device_kind


def winner(operation, implementation, kind, sizes):
    return {operation: {HERE: [{"implementation": implementation, "kind": kind, "sizes": sizes, "rate": 1.0}]}}


def picked(table, function, *arrays, **options):
    with supplied(table), choices() as made:
        jax.eval_shape(lambda *arrays: function(*arrays, **options), *arrays)
    (one,) = made  # also where there was another before it
    return one


def test_where_the_winner_cannot_run_the_portable_one_does(monkeypatch, caplog):
    x = jnp.zeros((4, 100))
    table = winner("rms_norm", "pallas", "float32", [4, 100])
    assert picked(table, rms_norm, x, x[0]).implementation == "pallas"
    monkeypatch.setattr(pallas, "MOST", 64)
    with caplog.at_level(logging.INFO, logger="jaxmem.kernels"):
        one = picked(table, rms_norm, x, x[0])
    assert one.implementation == "reference"
    said = "x has rows of 100; the pallas implementation takes 64 at most"
    assert one.why == f"pallas, the fastest of [4, 100] on {HERE}, cannot: rms_norm: {said}"
    assert one.why in caplog.text
    with pytest.raises(ValueError, match=said):
        rms_norm(x, x[0], implementation="pallas")

    wide = jnp.zeros((1, 4, 1, 300), jnp.float16)
    table = winner("attention", "mosaic", "float16 full", [4, 4, 1, 300])
    assert picked(table, attention, wide, wide, wide).implementation == "blockwise"
    codes, scale = jnp.zeros((3, 8), jnp.uint8), jnp.ones((2, 8))
    table = winner("dequant_matmul", "pallas", "nf4 float32", [4, 6, 8])
    assert picked(table, dequant_matmul, x[:, :6], codes, scale, format="nf4", block_size=3).implementation == "sliced"


def test_a_kernel_that_won_leaves_split_arrays_to_plain_jax():
    mesh = Mesh(np.array(jax.devices()[:2]), ("d",))
    x = jax.device_put(jnp.ones((4, 100)), NamedSharding(mesh, PartitionSpec("d")))
    with supplied(winner("rms_norm", "pallas", "float32", [4, 100])), choices() as made:
        y = rms_norm(x, jnp.ones(100))
    assert [one.implementation for one in made] == ["reference"]
    assert "lies split over devices" in made[0].why
    assert len(y.sharding.device_set) == 2


def test_a_table_holds_as_long_as_it_is_supplied():
    x = jnp.zeros((5, 100))
    call = rms_norm, x, x[0]
    assert picked({}, *call).implementation == "reference"
    assert picked(winner("rms_norm", "pallas", "float32", [5, 100]), *call).implementation == "pallas"
    assert picked(winner("rms_norm", "reference", "float32", [5, 100]), *call).implementation == "reference"
    assert picked({}, *call).why == f"{HERE} was not measured: reference runs everywhere"


def test_all_logits_are_held_only_where_that_is_asked_for():
    x, w, labels = jnp.zeros((4, 8)), jnp.zeros((8, 9)), jnp.zeros(4, jnp.int32)
    table = winner("cross_entropy", "reference", "float32", [4, 8, 9])
    assert picked(table, cross_entropy, x, w, labels).implementation == "sliced"
    assert picked(table, cross_entropy, x, w, labels, implementation="reference").implementation == "reference"
    (entry,) = winner("cross_entropy", "pallas", "float32", [400, 800, 900])["cross_entropy"][HERE]
    table["cross_entropy"][HERE].append(entry)
    assert picked(table, cross_entropy, x, w, labels).implementation == "pallas"


def test_a_winner_that_is_no_more_is_none():
    x = jnp.zeros((6, 100))
    assert picked(winner("rms_norm", "gone", "float32", [6, 100]), rms_norm, x, x[0]).implementation == "reference"
    assert choice.tuned() == choice._kept()
