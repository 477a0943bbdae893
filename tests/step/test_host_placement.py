"""State and frozen weights in host memory: the same training, kept and read as any other, and off the device by what a
compiler counts."""

import jax
import numpy as np
import pytest

from jaxmem.checkpoint.manager import Checkpoints
from jaxmem.errors import UserError
from jaxmem.estimate.state import bytes_on_device
from jaxmem.planning import result
from jaxmem.step import host_placement
from jaxmem.step.programs import program
from tests.step.conftest import SMALL, Trained, config

# The output projection and attention learn, the embedding and the MLPs stay.
SOME = {
    "mesh": {"fsdp": 2, "tensor": 2},
    "optimizer": {"epsilon": 1e-3, "clip": None, "trainable": ["head.*", "blocks.attention.*"]},
}
AWAY = ["optimizer", "frozen", "activations"]


@pytest.fixture(scope="module")
def usual():
    return Trained(config(**SOME), devices=4, updates=2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("update", ["after", "during"])
def test_the_training_is_the_same(usual, update, tmp_path):
    """In slices of tables, and a layer ahead."""
    memory = {"offload": AWAY, "update": update, "remat": "full", "loss_chunk": 64}
    away = Trained(config(**SOME, memory=memory), devices=4, updates=2, begin=usual)
    waiting = jax.tree.leaves(away.built.spec.host_state)
    assert all(x.sharding.memory_kind == "pinned_host" for x in waiting)
    there = [x for x in jax.tree.leaves(away.state) if x.sharding.memory_kind == "pinned_host"]
    assert [(x.shape, x.sharding) for x in there] == [(x.shape, x.sharding) for x in waiting]
    # The embedding and the MLPs' three; of the head and attention's four both moments.
    assert len(waiting) == 4 + 2 * 5
    away.agrees_with(usual)
    if update == "after":
        assert_kept(away, tmp_path)


@pytest.mark.exhaustive
def test_gradients_of_bfloat16_matrices_stay_in_float32():
    sections = {
        "precision": {"parameters": "bfloat16", "gradients": "float32", "compute": "float32", "master": "float32"},
        "optimizer": {"clip": None},
    }
    usual = Trained(config(**sections), updates=1)
    away = Trained(config(**sections, memory={"offload": "optimizer"}), updates=1, begin=usual)
    same = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-9)  # noqa: E731
    jax.tree.map(same, away.state.opt_state, usual.state.opt_state)


def assert_kept(trained, directory):
    """In a checkpoint, where it was, bit by bit."""
    with Checkpoints(directory, every=1, keep=1, keep_best=False) as checkpoints:
        checkpoints.save(1, trained.state, {}, {}, None, force=True)
        checkpoints.wait()
        _, state, *_ = checkpoints.restore_latest(lambda _: trained.built.spec.state)
    for one, other in zip(jax.tree.leaves(trained.state), jax.tree.leaves(state), strict=True):
        assert one.sharding == other.sharding
        np.testing.assert_array_equal(one, other)


@pytest.mark.exhaustive
def test_bytes_leave_the_device():
    """Of GPUs that are not here, with the places written into the program."""
    wide = {**SMALL, "preset": "tiny", "vocab": 2048, "embed": 128, "mlp": 1024, "layers": 4}
    memory = {"offload": AWAY, "remat": "full", "update": "during", "loss_chunk": 512}
    plan = result.plan(config(**{**SOME, "mesh": {"fsdp": 2}}, model=wide, memory=memory), "h100-80gb:2")
    built, sizes = plan.program, plan.compiled_step.sizes
    waiting, state = bytes_on_device(built.spec.host_state), bytes_on_device(built.spec.state)
    assert waiting > 0.8 * state
    assert plan.compiled_step.host_total >= waiting
    assert sizes["arguments"] == state - waiting + bytes_on_device(built.spec.batch)
    assert sizes["aliased"] == state - waiting
    assert plan.phases["initialise"] < state
    assert not [one for one in plan.warnings if "offloaded" in one.kind]
    # Layers that stay come to both passes, the table once, the optimizer's state goes both ways.
    frozen, moments = bytes_on_device(built.spec.host_state.params), bytes_on_device(built.spec.host_state.opt_state)
    table = bytes_on_device(built.spec.host_state.params["embedding"])
    moved = plan.as_json()["host_transfers"]
    assert moved["from host"]["bytes"] >= 2 * frozen - table + moments
    assert moved["to host"]["bytes"] >= moments
    assert moved["from host"]["seconds"] > 0


def test_where_there_is_no_such_memory_it_is_said(monkeypatch):
    monkeypatch.setattr(host_placement, "memory_kinds", lambda _: {"device"})
    built = program(config(memory={"offload": "optimizer"}), jax.devices()[:1])
    with pytest.raises(UserError, match="cpu devices have no pinned_host memory, only device; use"):
        _ = built.spec.state
