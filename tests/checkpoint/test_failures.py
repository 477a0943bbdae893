"""Checkpoints survive a kill at any moment, find what is damaged, and say what disks refuse."""

import gc
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from etils import epath

from jaxmem.checkpoint.manager import ROTATED_DIRECTORY, Checkpoints
from jaxmem.checkpoint.paths import checkpoint_directory, move_aside
from jaxmem.checkpoint.record import DamagedError
from jaxmem.config import load_config
from jaxmem.errors import UserError
from tests.checkpoint.conftest import abstract, bits, filled, mesh


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


@pytest.fixture(autouse=True)
def no_failed_reads_left() -> Iterator[None]:
    """Several reads of one restore fail, and Python reports those that nobody awaits when it frees them: not in another
    test."""
    yield
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "unraisablehook", lambda _: None)
        gc.collect()


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A directory of three checkpoints, and the shapes of their state."""
    place = tmp_path_factory.mktemp("three")
    shapes = {"params": abstract(mesh(4, 1), width=512).params["layers"]["up"]}
    with Checkpoints(place, every=1, keep=5) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, filled(shapes, seed=step), {"step": step}, {}, metrics={"loss": 4.0 - step})
    return place, shapes


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found_and_the_one_before_is_used(
    tmp_path: Path, damage: str, three: tuple[Path, dict[str, Any]], capfd: pytest.CaptureFixture
) -> None:
    place, shapes = three
    shutil.copytree(place, tmp_path, dirs_exist_ok=True)
    pattern, harm = DAMAGES[damage]
    for step in (3, 2):
        for file in list((tmp_path / str(step)).glob(pattern)):
            harm(file)
    said: list[str] = []
    with Checkpoints(tmp_path, every=1, keep=5) as checkpoints:
        with pytest.raises(DamagedError, match=f"checkpoint {tmp_path / '3'} is damaged: .+"):
            checkpoints.restore(3, shapes)
        readable = 1 if "position" in damage else 3
        assert checkpoints.read_latest() == (readable, {"step": readable}, {})
        found = checkpoints.restore_latest(shapes, report=said.append)
        assert found is not None
        assert found[0] == 1
        assert bits(found[1]) == bits(filled(shapes, seed=1))
        assert found[2] == {"step": 1}
        assert [line.split(" is damaged")[0] for line in said] == [f"checkpoint {tmp_path / s}" for s in ("3", "2")]
        assert said[0].endswith(f"renamed to {tmp_path / '3.old-1'}")
        assert checkpoints.save(3, found[1], {}, {})  # the place is free
    assert capfd.readouterr() == ("", "")


def test_it_stops_where_all_are_damaged(tmp_path: Path) -> None:
    shapes = {"params": abstract(mesh(1, 1)).params["embed"]}
    with Checkpoints(tmp_path, every=1) as checkpoints:
        assert checkpoints.restore_latest(shapes) is None
        assert checkpoints.read_latest() is None
        for step in (1, 2):
            checkpoints.save(step, filled(shapes), {}, {})
            checkpoints.wait()
            flip(tmp_path / str(step) / "run/metadata")
        with pytest.raises(DamagedError, match=r"all 2 checkpoints in .* are damaged"):
            checkpoints.restore_latest(shapes, report=lambda _: None)


@pytest.mark.parametrize("name", ["7", "007", "9" * 23])
def test_a_directory_that_is_no_checkpoint_is_reported_and_ignored(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture
) -> None:
    shapes = {"params": abstract(mesh(1, 1)).params["embed"]}
    with Checkpoints(tmp_path, every=1) as checkpoints:
        checkpoints.save(1, filled(shapes), {}, {})
    (tmp_path / name).mkdir()
    with Checkpoints(tmp_path, every=1) as checkpoints:
        found = checkpoints.restore_latest(shapes)
        assert found is not None
        assert found[0] == 1
        assert checkpoints.save(7, filled(shapes), {}, {})
        assert checkpoints.steps() == [1, 7]
    [line] = capsys.readouterr().out.splitlines()
    assert f"renamed to {tmp_path / name}.old-1" in line


def test_a_copy_under_a_later_step_is_found(tmp_path: Path) -> None:
    shapes = {"params": abstract(mesh(1, 1)).params["embed"]}
    with Checkpoints(tmp_path, every=1) as checkpoints:
        checkpoints.save(1, filled(shapes), {}, {})
    shutil.copytree(tmp_path / "1", tmp_path / "50")
    said: list[str] = []
    with Checkpoints(tmp_path, every=1) as checkpoints:
        assert checkpoints.read_latest() == (1, {}, {})
        found = checkpoints.restore_latest(shapes, report=said.append)
        assert found is not None
        assert found[0] == 1
    assert "copy of the checkpoint of step 1" in said[0]


def test_checkpoints_that_are_no_directory(tmp_path: Path) -> None:
    cfg = load_config({"name": "x", "output": str(tmp_path), "model": {"preset": "tiny"}, "train": {"steps": 1}})
    (tmp_path / "x").mkdir()
    place = tmp_path / "x" / "checkpoints"
    place.write_text("")
    with pytest.raises(UserError, match=f"{place} is not a directory"):
        checkpoint_directory(tmp_path / "x", cfg.checkpoint.path, cfg.name)


@pytest.mark.parametrize("name", ["", "9", ROTATED_DIRECTORY, "2.orbax-checkpoint-tmp", "itself"])
def test_links_among_checkpoints_are_refused_and_what_they_point_to_is_unchanged(tmp_path: Path, name: str) -> None:
    place, elsewhere = tmp_path / "checkpoints", tmp_path / "elsewhere"
    for folder in (place, elsewhere, elsewhere / "inside"):
        folder.mkdir()
    (elsewhere / "inside" / "file").write_text("kept")
    link = place / name
    if link == place:
        place.rmdir()
    link.symlink_to(link if name == "itself" else elsewhere)
    with pytest.raises(UserError, match=f"{link} is a symbolic link to "):
        Checkpoints(place, every=1)
    assert (elsewhere / "inside" / "file").read_text() == "kept"
    assert link.is_symlink()


def test_a_link_is_renamed_itself(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").write_text("kept")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    assert move_aside(tmp_path / "link") == epath.Path(tmp_path / "link.old-1")
    assert (tmp_path / "elsewhere" / "file").read_text() == "kept"


WRITER = """
import sys, jax, jax.numpy as jnp
from jaxmem.checkpoint.manager import Checkpoints
with Checkpoints(sys.argv[1], every=1, keep=1) as checkpoints:
    step = checkpoints.latest() or 0
    while True:
        step += 1
        state = {f"part{i}": jnp.full((256, 1024), step, jnp.float32) for i in range(4)}
        checkpoints.save(step, state, {"step": step}, {})
        print(step, flush=True)
"""


@pytest.mark.exhaustive
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
    half, old = tmp_path / "2.orbax-checkpoint-tmp", tmp_path / ROTATED_DIRECTORY / "0"
    for directory in (half, old):
        directory.mkdir(parents=True)
        (directory / "data").write_text("half")
    with Checkpoints(tmp_path, read_only=True) as checkpoints:
        assert checkpoints.steps() == [1]
    assert half.exists()
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.steps() == [1]
        assert checkpoints.save(2, {"x": jnp.ones(3)}, {}, {}, force=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == [ROTATED_DIRECTORY, "1", "2"]
    assert not old.exists()


def test_a_replaced_checkpoint_that_cannot_be_deleted_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    stuck = tmp_path / ROTATED_DIRECTORY / "1"
    monkeypatch.setattr("jaxmem.checkpoint.manager.say", said.append)
    with Checkpoints(tmp_path, every=1, keep=1) as checkpoints:
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "rmtree", deny)
            for step in (1, 2):
                checkpoints.save(step, {"x": jnp.ones(3)}, {}, {})
                checkpoints.wait()
        [line] = said
        assert line.startswith(f"warning: {stuck} cannot be deleted: Permission denied; delete it")
        assert stuck.exists()
        checkpoints.save(3, {"x": jnp.ones(3)}, {}, {})
    assert not stuck.exists()


def deny(*_: Any, **__: Any) -> None:
    raise PermissionError(13, "Permission denied")


FULL_DISK = """
import resource, sys, jax, jax.numpy as jnp, numpy as np
from jaxmem.checkpoint.manager import Checkpoints
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


def test_hooks_of_the_interpreter_last_as_long_as_the_checkpoints_are_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda failure: printed.append(str(failure.exc_value)))
    before = sys.unraisablehook

    def print_error(text: str) -> None:
        sys.unraisablehook(SimpleNamespace(exc_value=RuntimeError(text), object=None))  # type: ignore[arg-type]

    first, second = Checkpoints(tmp_path / "1"), Checkpoints(tmp_path / "2")
    print_error("Event loop is closed")  # as TensorStore does when another write ends after the failed one
    print_error("another")
    first.close()
    print_error("Event loop is closed")
    assert printed == ["another"]
    second.close()
    print_error("Event loop is closed")
    assert printed == ["another", "Event loop is closed"]
    sys.unraisablehook = before
    with Checkpoints(tmp_path / "1"):
        assert sys.unraisablehook is not before
    assert sys.unraisablehook is before


def test_logs_of_orbax_are_not_printed_while_the_checkpoints_are_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, elsewhere = "/orbax/checkpoint/serialization.py", __file__

    def is_printed(logger: str, file: str, has_frames: bool = True) -> bool:
        try:
            exec(compile("raise ValueError", file, "exec"))
        except ValueError as error:
            trace = (ValueError, error, error.__traceback__.tb_next if error.__traceback__ and has_frames else None)
        record = logging.LogRecord(logger, logging.ERROR, file, 1, "exception was never retrieved", (), trace)
        return bool(logging.getLogger(logger).filter(record))

    for logger in ("absl", "asyncio"):
        monkeypatch.setattr(logging.getLogger(logger), "filters", [])  # without those of failures in other tests
        with Checkpoints(tmp_path):
            assert not is_printed(logger, here)
            assert is_printed(logger, elsewhere)
            assert is_printed(logger, elsewhere, has_frames=False) == (logger != "asyncio")  # set by TensorStore
        assert is_printed(logger, here)


@pytest.mark.exhaustive
def test_a_full_disk_is_reported_and_training_continues(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", FULL_DISK, str(tmp_path)], capture_output=True, text=True, check=True)
    said, after = done.stdout.splitlines()
    assert done.stderr == ""
    assert said.startswith(f"checkpoint {tmp_path}/2 could not be written (last complete checkpoint: step 1): ")
    assert "File too large" in said
    assert after == "[1] True [1, 3]"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "3"]
    assert done.stderr == ""


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot open checkpoints in .*file/checkpoints: .*Not a directory"):
        Checkpoints(tmp_path / "file" / "checkpoints")
