"""Collectives against numpy, and that each is the collective that its name promises."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxmem.distributed.communicator import Communicator

REDUCED = {"sum": np.sum, "max": np.max, "mean": np.mean}


@pytest.fixture(scope="module")
def values() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(4, 8, 3)).astype(np.float32)


@pytest.fixture(params=["devices in a row", "an axis of a mesh"])
def comm(request: pytest.FixtureRequest) -> Communicator:
    if request.param == "devices in a row":
        return Communicator(jax.devices()[:4])
    return Communicator(Mesh(np.asarray(jax.devices()).reshape(2, 4), ("other", "ring")), "ring")


@pytest.mark.parametrize("op", REDUCED)
def test_reductions(comm: Communicator, values: np.ndarray, op: str) -> None:
    expected = REDUCED[op](values.astype(np.float64), axis=0)
    reduced = comm.allreduce(comm.put(values), op)
    assert reduced.is_fully_replicated
    np.testing.assert_allclose(reduced, expected, rtol=1e-6, atol=1e-6)


def test_gather(comm: Communicator, values: np.ndarray) -> None:
    placed = comm.put(values)
    gathered = comm.all_gather(placed)
    assert gathered.is_fully_replicated
    assert not placed.is_fully_replicated
    np.testing.assert_array_equal(gathered, values)


def test_integers(values: np.ndarray) -> None:
    comm = Communicator(jax.devices()[:4])
    numbers = comm.put(np.arange(4, dtype=np.int32))
    assert (int(comm.allreduce(numbers)), int(comm.allreduce(numbers, "max"))) == (6, 3)


def test_an_axis_has_to_be_of_the_mesh() -> None:
    comm = Communicator(jax.devices()[:4])
    with pytest.raises(ValueError, match="unknown axis 'x'; the mesh has rank"):
        Communicator(comm.mesh, "x")
