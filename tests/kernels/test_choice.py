"""Which implementation runs where none is named: the nearest winner, the portable one where that cannot."""

import logging
import subprocess
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxmem.kernels import attention, choice, dequant_matmul
from jaxmem.kernels.choice import record_choices
from jaxmem.kernels.quantized_matmul import triton

HERE = jax.devices()[0].device_kind


def use_table(table):
    return mock.patch.object(choice, "tuned", return_value=table)


def winner(operation, implementation, kind, sizes):
    return {operation: {HERE: [{"implementation": implementation, "kind": kind, "sizes": sizes, "rate": 1.0}]}}


def picked(table, function, *arrays, **options):
    with use_table(table), record_choices() as recorded:
        jax.eval_shape(lambda *arrays: function(*arrays, **options), *arrays)
    (one,) = recorded  # also where there was another before it
    return one


def chosen(table, rows=4, **options):
    x, codes, scale = jnp.zeros((rows, 64)), jnp.zeros((64, 8), jnp.int8), jnp.ones((1, 8))
    return picked(table, dequant_matmul, x, codes, scale, format="int8", block_size=64, **options)


def refuse(*_):
    raise ValueError("dequant_matmul: no tile fits")


def entry(implementation, rows=4):
    return winner("dequant_matmul", implementation, "int8 float32", [rows, 64, 8])


def test_where_the_winner_cannot_run_the_portable_one_does(monkeypatch, caplog):
    assert chosen(entry("triton")).implementation == "triton"
    monkeypatch.setattr(triton, "fitting", refuse)
    with caplog.at_level(logging.INFO, logger="jaxmem.kernels"):
        one = chosen(entry("triton"))
    assert one.implementation == "sliced"
    assert one.why.startswith(
        f"triton, the fastest of [4, 64, 8] on {HERE}, does not support the call: dequant_matmul:"
    )
    assert one.why in caplog.text
    with pytest.raises(ValueError, match="no tile fits"):
        chosen({}, implementation="triton")

    wide = jnp.zeros((1, 4, 1, 300), jnp.float16)
    table = winner("attention", "mosaic", "float16 full", [4, 4, 1, 300])
    assert picked(table, attention, wide, wide, wide).implementation == "blockwise"


def test_a_kernel_that_won_leaves_sharded_arrays_to_plain_jax():
    mesh = Mesh(np.array(jax.devices()[:2]), ("d",))
    x = jax.device_put(jnp.ones((4, 64)), NamedSharding(mesh, PartitionSpec("d")))
    with use_table(entry("triton")), record_choices() as recorded:
        y = dequant_matmul(x, jnp.zeros((64, 8), jnp.int8), jnp.ones((1, 8)), format="int8", block_size=64)
    assert [one.implementation for one in recorded] == ["sliced"]
    assert "is sharded over devices" in recorded[0].why
    assert len(y.sharding.device_set) == 2


def test_a_table_holds_as_long_as_it_is_used():
    assert chosen({}, 5).implementation == "sliced"
    assert chosen(entry("triton", 5), 5).implementation == "triton"
    assert chosen(entry("sliced", 5), 5).implementation == "sliced"
    assert chosen({}, 5).why == f"{HERE} was not measured: sliced runs everywhere"


def test_a_whole_weight_is_held_only_where_that_is_asked_for():
    table = entry("reference")
    assert chosen(table).implementation == "sliced"
    assert chosen(table, implementation="reference").implementation == "reference"
    (other,) = entry("triton", 400)["dequant_matmul"][HERE]
    table["dequant_matmul"][HERE].append(other)
    assert chosen(table).implementation == "triton"


def test_an_entry_of_an_implementation_that_is_gone_is_ignored():
    assert chosen(entry("gone", 6), 6).implementation == "sliced"


def test_an_implementation_is_imported_when_it_is_called():
    """And an operation when it is used."""
    code = """
import sys
import jaxmem.kernels
assert not [name for name in sys.modules if name.startswith("jaxmem.kernels.")]
from jaxmem.kernels import attention, dequant_matmul
loaded = {name.rpartition(".")[2] for name in sys.modules if name.startswith("jaxmem.kernels.")}
assert not loaded & {"mosaic", "triton", "ring", "blockwise", "reference", "sliced", "flash"}, loaded
"""
    subprocess.run([sys.executable, "-c", code], check=True)
