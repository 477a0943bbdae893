"""Checkpoints come back bit by bit on any mesh, survive a kill at any moment, and say what is wrong with them."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxmem.checkpoint import Best, Checkpoints, DamagedError, failures, put_aside
from jaxmem.checkpoint.manager import ROTATED
from jaxmem.checksum import checksum, sum_bits
from jaxmem.errors import UserError

POSITION = {"rows": 96, "sources": [{"file": 3, "offset": 12}], "fingerprint": "5f0c"}
CONFIG = {"name": "x", "model": {"stages": (32, 64)}, "optimizer": {"clip": None}}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    step: jax.Array
    params: dict[str, Any]
    opt_state: Any


def mesh(rows: int, columns: int) -> Mesh:
    devices = np.asarray(jax.devices()[: rows * columns]).reshape(rows, columns)
    return Mesh(devices, ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)


def abstract(on: Mesh, width: int = 32, dtype: Any = jnp.bfloat16) -> State:
    """What the state looks like and lies on: [layer, embed, mlp] split over both axes, vectors over one."""
    params = {
        "layers": {
            "up": jax.ShapeDtypeStruct((3, 16, width), dtype),
            "norm": jax.ShapeDtypeStruct((3, 16), jnp.float32),
        },
        "embed": jax.ShapeDtypeStruct((64, 16), jnp.float32),
    }
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    state = State(jax.ShapeDtypeStruct((), jnp.int32), params, jax.eval_shape(tx.init, params))
    specs = {0: PartitionSpec(), 2: PartitionSpec(None, "fsdp"), 3: PartitionSpec(None, "fsdp", "tensor")}
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(on, specs[len(x.shape)])), state
    )


def filled(shapes: Any, seed: int = 0) -> Any:
    """Every bit pattern, NaNs included."""
    rng = np.random.default_rng(seed)

    def fill(x: jax.ShapeDtypeStruct) -> jax.Array:
        bits = rng.integers(0, 256, (*x.shape, x.dtype.itemsize), np.uint8)
        return jax.device_put(bits.view(x.dtype).reshape(x.shape), x.sharding)

    return jax.tree.map(fill, shapes)


def bits(tree: Any) -> list[bytes]:
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


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
        with pytest.raises(UserError, match=r"no checkpoint of step 7 in .*; there are: \[1\]"):
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
        assert list((directory / ROTATED).iterdir()) == []
        with Checkpoints(directory, read_only=True) as checkpoints:
            assert checkpoints.best() == (Best(2, 1.5) if keep_best else Best(6, 2.0))
            assert checkpoints.latest() == 6


def test_a_new_best_is_saved_whenever_it_is_found(tmp_path: Path) -> None:
    losses = {1: 3.0, 2: 2.0, 3: 2.5, 4: float("nan"), 5: 1.0, 6: None, 7: 1.0}
    for keep_best, saved in ((True, [1, 2, 5]), (False, [])):
        with Checkpoints(tmp_path / str(keep_best), keep=9, keep_best=keep_best) as checkpoints:
            for step, loss in losses.items():
                metrics = {} if loss is None else {"loss": loss}
                assert checkpoints.save(step, {"x": jnp.ones(3)}, {}, {}, metrics) == (step in saved)


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    on = mesh(4, 1)
    with Checkpoints(tmp_path, every=1) as checkpoints:
        checkpoints.save(1, filled(abstract(on)), POSITION, CONFIG)
        both = r"params.layers.up is bfloat16\[3, 16, 32\] in the checkpoint and "
        with pytest.raises(UserError, match=both + r"bfloat16\[3, 16, 64\] here"):
            checkpoints.restore(1, abstract(on, width=64))
        with pytest.raises(UserError, match=both + r"float32\[3, 16, 32\] here"):
            checkpoints.restore(1, abstract(on, dtype=jnp.float32))
        shapes = abstract(on)
        with pytest.raises(UserError, match=r"opt_state.1.0.count is int32\[\] in the checkpoint and absent here"):
            checkpoints.restore(1, State(shapes.step, shapes.params, ()))
        params = {**shapes.params, "head": shapes.params["embed"]}
        with pytest.raises(UserError, match=r"params.head is absent in the checkpoint and float32\[64, 16\] here"):
            checkpoints.restore_params(1, params)
        with pytest.raises(ValueError, match=r"no sharding to restore to: params.embed"):
            checkpoints.restore_params(1, {"embed": jax.ShapeDtypeStruct((64, 16), jnp.float32)})


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 16
    file.write_bytes(data)


DAMAGES: dict[str, tuple[str, Callable[[Path], None]]] = {
    "index missing": ("state/manifest.ocdbt", Path.unlink),
    "index cut": ("state/manifest.ocdbt", cut),
    "data missing": ("state/ocdbt.process_0/d/*", Path.unlink),
    "data cut": ("state/ocdbt.process_0/d/*", cut),
    "data flipped": ("state/ocdbt.process_0/d/*", flip),
    "tree emptied": ("state/_METADATA", lambda file: file.write_text("")),
    "position missing": ("run/metadata", Path.unlink),
    "position flipped": ("run/metadata", flip),
    "state missing": ("state", lambda path: path.rename(path.with_name("lost"))),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found_and_the_one_before_is_used(tmp_path: Path, damage: str, capfd: pytest.CaptureFixture) -> None:
    shapes = {"params": abstract(mesh(4, 1), width=512).params["layers"]["up"]}
    pattern, harm = DAMAGES[damage]
    with Checkpoints(tmp_path, every=1, keep=5) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, filled(shapes, seed=step), {"step": step}, {}, metrics={"loss": 4.0 - step})
    for step in (3, 2):
        for file in list((tmp_path / str(step)).glob(pattern)):
            harm(file)
    said: list[str] = []
    with Checkpoints(tmp_path, every=1, keep=5) as checkpoints:
        with pytest.raises(DamagedError, match=f"checkpoint {tmp_path / '3'} is damaged: .+"):
            checkpoints.restore(3, shapes)
        assert checkpoints.read_latest() == ({"step": 1 if "position" in damage else 3}, {})
        found = checkpoints.restore_latest(shapes, say=said.append)
        assert found is not None
        assert found[0] == 1
        assert bits(found[1]) == bits(filled(shapes, seed=1))
        assert found[2] == {"step": 1}
        assert [line.split(" is damaged")[0] for line in said] == [f"checkpoint {tmp_path / s}" for s in ("3", "2")]
        assert said[0].endswith(f"put aside as {tmp_path / '3.old-1'}")
        assert checkpoints.save(3, found[1], {}, {})  # the place is free
    assert capfd.readouterr() == ("", "")


def test_with_none_whole_it_stops(tmp_path: Path) -> None:
    shapes = {"params": abstract(mesh(1, 1)).params["embed"]}
    with Checkpoints(tmp_path, every=1) as checkpoints:
        assert checkpoints.restore_latest(shapes) is None
        assert checkpoints.read_latest() is None
        for step in (1, 2):
            checkpoints.save(step, filled(shapes), {}, {})
            checkpoints.wait()
            flip(tmp_path / str(step) / "run/metadata")
        with pytest.raises(DamagedError, match="none of the 2 checkpoints"):
            checkpoints.restore_latest(shapes, say=lambda _: None)


WRITER = """
import sys, jax, jax.numpy as jnp
from jaxmem.checkpoint import Checkpoints
with Checkpoints(sys.argv[1], every=1, keep=1) as checkpoints:
    step = checkpoints.latest() or 0
    while True:
        step += 1
        state = {f"part{i}": jnp.full((256, 1024), step, jnp.float32) for i in range(4)}
        checkpoints.save(step, state, {"step": step}, {})
        print(step, flush=True)
"""


def test_killed_at_any_moment_a_whole_checkpoint_remains(tmp_path: Path) -> None:
    """Writing and rotating without a pause, killed at random; the next one goes on from what is whole."""
    shape = jax.ShapeDtypeStruct((256, 1024), jnp.float32, sharding=jax.device_put(0).sharding)
    before = 0
    for delay in (0.01, 0.07, 0.15):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        for _ in range(3):  # two are whole, one is being written
            assert writer.stdout.readline().strip().isdigit()
        time.sleep(delay * random.random())
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        with Checkpoints(tmp_path, read_only=True) as checkpoints:
            assert checkpoints.steps()
            for step in checkpoints.steps():
                state, position, _ = checkpoints.restore(step, {f"part{i}": shape for i in range(4)})
                assert position == {"step": step}
                assert {float(value) for part in state.values() for value in (part.min(), part.max())} == {step}
            last = checkpoints.latest()
        assert last is not None
        assert last > before
        before = last


def test_the_half_written_is_cleared_by_who_writes_and_left_by_who_reads(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, every=1) as checkpoints:
        checkpoints.save(1, {"x": jnp.ones(3)}, {}, {})
    half, old = tmp_path / "2.orbax-checkpoint-tmp", tmp_path / ROTATED / "0"
    for directory in (half, old):
        directory.mkdir(parents=True)
        (directory / "data").write_text("half")
    with Checkpoints(tmp_path, read_only=True) as checkpoints:
        assert checkpoints.steps() == [1]
    assert half.exists()
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.steps() == [1]
        assert checkpoints.save(2, {"x": jnp.ones(3)}, {}, {}, force=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == [ROTATED, "1", "2"]
    assert not old.exists()


FULL_DISK = """
import resource, sys, jax, jax.numpy as jnp, numpy as np
from jaxmem.checkpoint import Checkpoints
from jaxmem.errors import UserError
state = {str(i): jax.random.normal(jax.random.key(i), (512, 128)) for i in range(9)}  # of which each write fails
with Checkpoints(sys.argv[1], every=1) as checkpoints:
    checkpoints.save(1, state, {}, {})
    checkpoints.wait()
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))  # bytes a file may have
    try:
        checkpoints.save(2, state, {}, {})
        checkpoints.wait()
        print("saved?")
    except UserError as error:
        print(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    print(checkpoints.steps(), checkpoints.save(3, state, {}, {}), checkpoints.steps())
"""


def test_writes_that_end_after_the_failure_say_nothing_of_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = asyncio.new_event_loop()
    failed.close()
    with pytest.raises(RuntimeError) as closed:
        failed.call_soon_threadsafe(print)  # as TensorStore does when a write ends
    told: list[Any] = []
    monkeypatch.setattr(failures, "_told", told.append)
    for error in (closed.value, RuntimeError("another")):
        failures._but_leftovers(SimpleNamespace(exc_value=error))
    assert [str(one.exc_value) for one in told] == ["another"]
    here = "/orbax/checkpoint/serialization.py"
    for file, passed in ((here, False), (__file__, True)):
        try:
            exec(compile("raise ValueError", file, "exec"))
        except ValueError as error:
            trace = (ValueError, error, error.__traceback__.tb_next)
        record = logging.LogRecord("asyncio", logging.ERROR, file, 1, "exception was never retrieved", (), trace)
        assert bool(logging.getLogger("asyncio").filter(record)) is passed


def test_a_full_disk_is_said_and_survived(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", FULL_DISK, str(tmp_path)], capture_output=True, text=True, check=True)
    said, after = done.stdout.splitlines()
    assert done.stderr == ""
    assert said.startswith(f"a checkpoint could not be written to {tmp_path} (step 1 is whole): ")
    assert "File too large" in said
    assert after == "[1] True [1, 3]"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "3"]
    assert done.stderr == ""


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot keep checkpoints in .*file/checkpoints: .*Not a directory"):
        Checkpoints(tmp_path / "file" / "checkpoints")


def test_put_aside(tmp_path: Path) -> None:
    directory, file = tmp_path / "checkpoints", tmp_path / "metrics.jsonl"
    directory.mkdir()
    assert put_aside(directory) is None  # empty
    assert put_aside(file) is None  # absent
    for n in (1, 2):
        directory.mkdir(exist_ok=True)
        (directory / "a").write_text(str(n))
        file.write_text(str(n))
        assert put_aside(directory) is not None
        assert put_aside(file) is not None
    names = ["checkpoints.old-1", "checkpoints.old-2", "metrics.old-1.jsonl", "metrics.old-2.jsonl"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert (tmp_path / "metrics.old-2.jsonl").read_text() == "2"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "uint4", "bool", "float8_e4m3fn"])
def test_checksum(dtype: str) -> None:
    x = jax.random.randint(jax.random.key(0), (8, 16), 0, 2).astype(dtype)
    sums = {checksum(jax.device_put(x, NamedSharding(on, PartitionSpec("fsdp", "tensor")))) for on in MESHES}
    assert len(sums) == 1
    other = x.at[3, 5].set((x[3, 5] == jnp.zeros((), dtype)).astype(dtype))
    swapped = x.at[0].set(x[1]).at[1].set(x[0])
    sums |= {checksum(other), checksum(swapped)}
    assert len(sums) == 3


MESHES = (mesh(1, 1), mesh(2, 2), mesh(8, 1), mesh(4, 2))


def test_checksum_sees_any_one_bit() -> None:
    x = np.random.default_rng(0).integers(0, 2**32, (5, 7), np.uint32)
    whole = checksum(jnp.asarray(x))
    for place, bit in ((0, 0), (17, 31), (34, 16), (6, 30)):
        y = x.copy()
        y.flat[place] ^= np.uint32(1 << bit)
        assert checksum(jnp.asarray(y)) != whole
    assert checksum(jnp.asarray(x.view(np.float32))) == whole  # bits, not values: NaNs have one too


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_checksum_costs_no_memory(dtype: Any) -> None:
    """In compiled bytes: nothing beside the array and the result grows with the array."""
    sharding = NamedSharding(mesh(4, 2), PartitionSpec("fsdp", "tensor"))
    compiled = sum_bits.lower(jax.ShapeDtypeStruct((4096, 1024), dtype, sharding=sharding)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4096 * 1024 // 100


def test_a_run_may_go_on_without_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    state = {"x": jnp.ones(3)}

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    for say in (told.append, None):
        with Checkpoints(tmp_path / str(say is None), every=1, say=say) as checkpoints:
            checkpoints.save(1, state, {}, {})
            checkpoints.wait()
            with monkeypatch.context() as patch:
                patch.setattr(checkpoints._manager, "save", full)
                if say is None:
                    with pytest.raises(UserError, match="step 2 could not be written"):
                        checkpoints.save(2, state, {}, {})
                else:
                    assert not checkpoints.save(2, state, {}, {})
            assert checkpoints.save(3, state, {}, {})
            assert checkpoints.steps() == [1, 3]
    [line] = told
    assert line.startswith("the checkpoint of step 2 could not be written")
    assert line.endswith("(step 1 is whole): [Errno 28] No space left on device; going on")
