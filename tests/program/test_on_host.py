"""State in host memory: the same training, kept and read as any other, and off the device by what a compiler counts."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxmem.checkpoint import Checkpoints
from jaxmem.errors import UserError
from jaxmem.planning.compile import compile_all
from jaxmem.planning.predict import held
from jaxmem.planning.targets import parse_target, target_devices
from jaxmem.program import on_host, program
from tests.program.conftest import Trained, config

MODEL = {"family": "mlp", "layers": 4, "embed": 32, "mlp": 128}
PICTURES = {"data": {"source": "digits"}, "objective": "classify", "model": MODEL, "mesh": {"fsdp": -1}}
PLAIN = {"epsilon": 1e-3, "clip": None}


def pictures(**sections):
    return config(**PICTURES, **sections)


@pytest.fixture(scope="module")
def usual():
    return Trained(pictures(optimizer=PLAIN), devices=8)


@pytest.mark.parametrize("update", ["after", "during"])
def test_the_training_is_the_same(usual, update, tmp_path):
    cfg = pictures(optimizer=PLAIN, memory={"offload": "optimizer", "update": update})
    away = Trained(cfg, devices=8)
    waiting = jax.tree.leaves(away.built.waiting)
    assert all(x.sharding.memory_kind == "pinned_host" for x in waiting)
    there = [x for x in jax.tree.leaves(away.state.opt_state) if x.sharding.memory_kind == "pinned_host"]
    assert [(x.shape, x.sharding) for x in there] == [(x.shape, x.sharding) for x in waiting]
    assert len(waiting) > 8
    losses = [[one["loss"] for one in run.metrics] for run in (usual, away)]
    np.testing.assert_allclose(*losses, rtol=1e-6)
    for one, other in zip(jax.tree.leaves(usual.state.params), jax.tree.leaves(away.state.params), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)
    if update == "after":
        assert_kept(away, tmp_path)


def assert_kept(trained, directory):
    """In a checkpoint, where it was, bit by bit."""
    with Checkpoints(directory, every=1, keep=1, keep_best=False) as checkpoints:
        checkpoints.save(1, trained.state, {}, {}, None, force=True)
        checkpoints.wait()
        _, state, *_ = checkpoints.restore_latest(lambda _: trained.built.state)
    for one, other in zip(jax.tree.leaves(trained.state), jax.tree.leaves(state), strict=True):
        assert one.sharding == other.sharding
        np.testing.assert_array_equal(one, other)


def test_bytes_leave_the_device():
    """Of GPUs that are not here, with the places written into the program."""
    devices = target_devices(parse_target("h100-80gb:2"), 2**36)
    memory = {"offload": ["optimizer", "activations"], "remat": "full", "update": "during"}
    cfg = pictures(optimizer=PLAIN, memory=memory)
    built = program(cfg, devices)
    step, sizes = compile_all(built.lower_step(), {"initialise": built.lower_initialise}, here=False)
    waiting, state = held(built.waiting), held(built.state)
    assert waiting > 0.8 * held(built.state.opt_state)
    assert step.host_total >= waiting
    assert step.sizes["arguments"] == state - waiting + held(built.batch)
    assert step.sizes["aliased"] == state - waiting
    assert sizes["initialise"] < state


def test_where_there_is_no_such_memory_it_is_said(monkeypatch):
    monkeypatch.setattr(on_host, "kinds", lambda _: {"device"})
    built = program(pictures(memory={"offload": "optimizer"}), jax.devices()[:1])
    with pytest.raises(UserError, match="cpu devices have no pinned_host memory, only device; use"):
        _ = built.state
