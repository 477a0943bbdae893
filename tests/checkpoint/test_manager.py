"""Checkpoints come back bit by bit on any mesh, and say what does not fit."""

import shutil
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxmem.checkpoint import manager
from jaxmem.checkpoint.manager import ROTATED_DIRECTORY, Checkpoints
from jaxmem.checkpoint.paths import move_aside
from jaxmem.checkpoint.record import DamagedError
from jaxmem.config import Config
from jaxmem.errors import UserError
from jaxmem.inference.load import read_checkpoint
from tests.checkpoint.conftest import State, abstract, bits, filled, mesh

POSITION = {"rows": 96, "sources": [{"file": 3, "offset": 12}], "fingerprint": "5f0c"}
CONFIG = {"name": "x", "model": {"stages": (32, 64)}, "optimizer": {"clip": None}}


def test_everything_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> None:
    monkeypatch.chdir(tmp_path)
    shapes = abstract(mesh(4, 2))
    state = filled(shapes)
    with Checkpoints("mit Leerzeichen, é", every=10) as checkpoints:
        assert checkpoints.latest() is None
        assert checkpoints.save(10, state, POSITION, CONFIG)
        restored, position, config = checkpoints.restore(10, shapes)
    assert bits(restored) == bits(state)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert jax.tree.map(lambda x: (x.dtype, x.sharding), restored) == jax.tree.map(
        lambda x: (x.dtype, x.sharding), state
    )
    assert position == POSITION
    assert config == {"name": "x", "model": {"stages": [32, 64]}, "optimizer": {"clip": None}}
    assert capfd.readouterr() == ("", "")


def test_a_state_moves_over_meshes(tmp_path: Path) -> None:
    """8 -> 4 -> 2 x 2 -> 1 -> 8 devices, saved by one and read by the next; nothing is whole where it is split."""
    meshes = [mesh(8, 1), mesh(4, 1), mesh(2, 2), mesh(1, 1), mesh(4, 2)]
    state = filled(abstract(meshes[0]))
    first = bits(state)
    with Checkpoints(tmp_path) as checkpoints:
        for step, on in enumerate(meshes[1:], 1):
            checkpoints.save(step, state, POSITION, CONFIG, force=True)
            state, _, _ = checkpoints.restore(step, abstract(on))
            assert bits(state) == first
            for leaf, wanted in zip(jax.tree.leaves(state), jax.tree.leaves(abstract(on)), strict=True):
                assert leaf.sharding == wanted.sharding
                assert {s.data.shape for s in leaf.addressable_shards} == {wanted.sharding.shard_shape(leaf.shape)}
            assert state.params["layers"]["up"].addressable_shards[0].data.size * on.size == 3 * 16 * 32


def test_the_state_may_be_donated_at_once(tmp_path: Path) -> None:
    """What is on its way to the disk is a copy, or memory that jax will not give away while it is looked at."""
    overwrite = jax.jit(lambda state: jax.tree.map(jnp.negative, state), donate_argnums=0)
    with Checkpoints(tmp_path, keep=9) as checkpoints:
        for step in range(1, 5):
            state = {"params": {"w": jnp.full((512, 4096), step, jnp.float32)}, "count": jnp.full((), step, jnp.int32)}
            shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
            checkpoints.save(step, state, {}, {}, force=True)
            state = overwrite(state)
            assert np.asarray(state["params"]["w"]).max() == -step
        for step in checkpoints.steps():
            restored, _, _ = checkpoints.restore(step, shapes)
            assert np.asarray(restored["params"]["w"]).min() == step == np.asarray(restored["params"]["w"]).max()


@pytest.mark.exhaustive
def test_many_leaves_while_a_step_runs(tmp_path: Path) -> None:
    """More programs with collectives than simulated devices can have under way at once."""
    sharding = NamedSharding(mesh(4, 2), PartitionSpec("fsdp", "tensor"))
    state = {f"w{i}": jax.device_put(jnp.full((32, 32), i, jnp.float32), sharding) for i in range(100)}
    step = jax.jit(lambda state: jax.tree.map(lambda x: x + jnp.sum(x), state), donate_argnums=0)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        for number in range(1, 4):
            state = step(state)
            checkpoints.save(number, state, {}, {}, force=True)
        last = bits(state)
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
        assert bits(checkpoints.restore(3, shapes)[0]) == last


def test_only_the_parameters(tmp_path: Path) -> None:
    """On another mesh, and whatever became of the optimizer's state."""
    state = filled(abstract(mesh(8, 1)))
    with Checkpoints(tmp_path, every=1) as checkpoints:
        checkpoints.save(1, state, POSITION, CONFIG)
    with Checkpoints(tmp_path, read_only=True) as checkpoints:
        params = checkpoints.restore_params(1, abstract(mesh(2, 2)).params)
        assert bits(params) == bits(state.params)
        assert params["embed"].sharding.mesh.size == 4
        assert checkpoints.read(1)[0] == POSITION
        with pytest.raises(ValueError, match="read_only"):
            checkpoints.save(2, state, POSITION, CONFIG, force=True)
        with pytest.raises(UserError, match=r"has no checkpoint of step 7; use 1"):
            checkpoints.read(7)


def test_when_to_save(tmp_path: Path) -> None:
    state = {"x": jnp.ones(3)}
    with Checkpoints(tmp_path / "a", every=2) as checkpoints:
        saved = [step for step in range(1, 8) if checkpoints.save(step, state, {}, {})]
        assert saved == [2, 4, 6]
        assert checkpoints.save(7, state, {}, {}, force=True)
        assert not checkpoints.save(7, state, {}, {}, force=True)  # it is there
    with Checkpoints(tmp_path / "b") as checkpoints:
        assert not checkpoints.save(2, state, {}, {})


def test_kept_are_the_newest_and_the_best(tmp_path: Path) -> None:
    losses = {1: 3.0, 2: 1.5, 3: float("nan"), 4: 2.0, 5: None, 6: 2.0}
    for keep_best, kept in ((True, [2, 5, 6]), (False, [5, 6])):
        directory = tmp_path / str(keep_best)
        with Checkpoints(directory, every=1, keep=2, keep_best=keep_best) as checkpoints:
            for step, loss in losses.items():
                checkpoints.save(step, {"x": jnp.ones(3)}, {}, {}, metrics=None if loss is None else {"loss": loss})
            assert checkpoints.steps() == kept
        assert list((directory / ROTATED_DIRECTORY).iterdir()) == []
        with Checkpoints(directory, read_only=True) as checkpoints:
            assert checkpoints.latest() == 6


def test_a_new_best_is_saved_whenever_it_is_found(tmp_path: Path) -> None:
    losses = {1: 3.0, 2: 2.0, 3: 2.5, 4: float("nan"), 5: 1.0, 6: None, 7: 1.0}
    for keep_best, saved in ((True, [1, 2, 5]), (False, [])):
        with Checkpoints(tmp_path / str(keep_best), keep=9, keep_best=keep_best) as checkpoints:
            for step, loss in losses.items():
                metrics = {} if loss is None else {"loss": loss}
                assert checkpoints.save(step, {"x": jnp.ones(3)}, {}, {}, metrics) == (step in saved)


def test_a_checkpoint_that_is_evaluated_after_its_save_may_be_the_best(tmp_path: Path) -> None:
    """As after a signal, which saves first."""
    with Checkpoints(tmp_path, keep=1, keep_best=True) as checkpoints:
        checkpoints.save(1, {"x": jnp.ones(3)}, POSITION, CONFIG, force=True)
        assert not checkpoints.save(1, {"x": jnp.ones(3)}, POSITION, CONFIG, {"loss": 1.0})
    with Checkpoints(tmp_path, keep=1, keep_best=True) as checkpoints:
        assert checkpoints.read(1)[0] == POSITION
        for step in (2, 3):
            checkpoints.save(step, {"x": jnp.ones(3)}, POSITION, CONFIG, {"loss": 2.0}, force=True)
        assert checkpoints.steps() == [1, 3]


def test_processes_wait_until_they_see_the_same_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network file system may show some hosts an old listing: they would take the newest checkpoint for damaged."""
    with Checkpoints(tmp_path) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {"x": jnp.ones(3)}, POSITION, CONFIG, {"loss": 2.0}, force=True)
    there: Any = iter(([1], [1, 2], [[1, 5.0], [2, None]]))
    waits: list[float] = []
    monkeypatch.setattr(manager, "gather_objects", lambda mine: [next(there), mine])
    monkeypatch.setattr(time, "sleep", waits.append)
    with Checkpoints(tmp_path, keep_best=True) as checkpoints:
        assert waits == [1]
        assert [checkpoints.is_due(3, {"loss": loss}) for loss in (4.0, 6.0)] == [True, False]  # than that of process 0
    monkeypatch.setattr(manager, "gather_objects", lambda mine: [mine, []])
    monkeypatch.setattr(manager, "LISTING_SECONDS", 0)
    with pytest.raises(UserError, match=r"the hosts see different checkpoints; set checkpoint\.path to"):
        Checkpoints(tmp_path)


def test_a_save_may_take_hours(tmp_path: Path) -> None:
    """Orbax's limit is 20 minutes by default."""
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints._manager._checkpointer._async_manager._timeout_secs > 12 * 3600


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    on = mesh(4, 1)
    with Checkpoints(tmp_path, every=1) as checkpoints:
        checkpoints.save(1, filled(abstract(on)), POSITION, CONFIG)
        both = r"params.layers.up is bfloat16\[3, 16, 32\] in the checkpoint and "
        with pytest.raises(UserError, match=both + r"bfloat16\[3, 16, 64\] in this run"):
            checkpoints.restore(1, abstract(on, width=64))
        with pytest.raises(UserError, match=both + r"float32\[3, 16, 32\] in this run"):
            checkpoints.restore(1, abstract(on, dtype=jnp.float32))
        shapes = abstract(on)
        with pytest.raises(UserError, match=r"opt_state.1.0.count is int32\[\] in the checkpoint and absent"):
            checkpoints.restore(1, State(shapes.step, shapes.params, ()))
        params = {**shapes.params, "head": shapes.params["embed"]}
        with pytest.raises(UserError, match=r"params.head is absent in the checkpoint and float32\[64, 16\]"):
            checkpoints.restore_params(1, params)
        with pytest.raises(ValueError, match=r"no sharding to restore to: params.embed"):
            checkpoints.restore_params(1, {"embed": jax.ShapeDtypeStruct((64, 16), jnp.float32)})


def test_put_aside(tmp_path: Path) -> None:
    directory, file = tmp_path / "checkpoints", tmp_path / "metrics.jsonl"
    directory.mkdir()
    assert move_aside(directory) is None  # empty
    assert move_aside(file) is None  # absent
    for n in (1, 2):
        directory.mkdir(exist_ok=True)
        (directory / "a").write_text(str(n))
        file.write_text(str(n))
        assert move_aside(directory) is not None
        assert move_aside(file) is not None
    names = ["checkpoints.old-1", "checkpoints.old-2", "metrics.old-1.jsonl", "metrics.old-2.jsonl"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert (tmp_path / "metrics.old-2.jsonl").read_text() == "2"


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (np.ones(3), "x, a ndarray; use jax.numpy.asarray"),
        (jax.random.key(0), "x, a random key; use jax.random.key_data"),
        (jnp.ones(3, jnp.complex64), r"x, complex64\[3\]; use integers"),
        (jnp.ones(3, jnp.float4_e2m1fn), r"x, float4_e2m1fn\[3\]; use integers"),
        (jnp.ones((0, 3)), r"x, float32\[0, 3\]; .* not empty"),
    ],
)
def test_leaves_that_cannot_be_saved_are_named(tmp_path: Path, leaf: object, message: str) -> None:
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(UserError, match=f"cannot save {message}"):
        checkpoints.save(1, {"x": leaf}, POSITION, CONFIG, force=True)


def test_a_reader_takes_the_checkpoint_of_a_step_or_the_best(tmp_path: Path) -> None:
    def read(step: int | str | None) -> int:
        place = {"path": str(tmp_path), "step": step}
        cfg = Config(name="x", model={"family": "mlp"}, train={"steps": 1}, checkpoint=place)
        return read_checkpoint("runs/x", cfg, lambda _, step: step)

    with Checkpoints(tmp_path / "x") as checkpoints:
        checkpoints.save(1, {"x": jnp.ones(3)}, POSITION, CONFIG, force=True)
        checkpoints.wait()
        with pytest.raises(UserError, match=r"runs/x: no checkpoint has a held-out loss, .* use a step \(1\)"):
            read("best")
        for step, loss in ((2, 1.0), (3, 2.0)):
            checkpoints.save(step, {"x": jnp.ones(3)}, POSITION, CONFIG, {"loss": loss}, force=True)
        checkpoints.wait()
        assert [read(step) for step in (None, 1, "best")] == [3, 1, 2]
        with pytest.raises(UserError, match=r"runs/x: has no checkpoint of checkpoint.step=4; use 1, 2 or 3"):
            read(4)


def test_a_reader_takes_the_next_checkpoint_if_the_run_has_deleted_its_own(tmp_path: Path) -> None:
    cfg = Config(name="x", model={"family": "mlp"}, train={"steps": 1}, checkpoint={"path": str(tmp_path)})
    with Checkpoints(tmp_path / "x") as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {"x": jnp.ones(3)}, POSITION, CONFIG, force=True)

    def read(checkpoints: Checkpoints, step: int) -> int:
        if step == 2:
            shutil.rmtree(tmp_path / "x" / "2")
        checkpoints.read(step)
        return step

    assert read_checkpoint(tmp_path, cfg, read) == 1
    (tmp_path / "x" / "1" / "run" / "metadata").write_text("")
    with pytest.raises(DamagedError):
        read_checkpoint(tmp_path, cfg, read)
