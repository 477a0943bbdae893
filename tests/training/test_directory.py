"""Two runs in one directory: the second is refused, and a killed run releases the lock."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import jax
import pytest
from etils import epath

from jaxmem.checkpoint.paths import refuse_links
from jaxmem.config import load_config
from jaxmem.errors import UserError
from jaxmem.training.directory import locked_places, run_directory, run_lock, write_description
from jaxmem.training.run import run

HOLD = """
import sys, time
from jaxmem.training.directory import run_lock
with run_lock(sys.argv[1], "x"):
    print("held")
    time.sleep(60)
"""


def test_a_second_run_is_refused(tmp_path):
    with run_lock(tmp_path, "x"):
        with pytest.raises(
            UserError, match=f"x is in use by process {os.getpid()} on .*; wait until it ends, or set another name"
        ):
            run_lock(tmp_path, "x").__enter__()
        with run_lock(tmp_path, "y"):
            pass
    with run_lock(tmp_path, "x"):
        pass
    assert not list(tmp_path.iterdir())


def test_runs_that_share_only_their_checkpoints_are_not_together(tmp_path):
    model = {"preset": "tiny"}
    raw = {"name": "x", "output": str(tmp_path / "runs"), "model": model, "train": {"steps": 1}}
    with run_lock(tmp_path / "shared", "x"), pytest.raises(UserError, match=r"shared/x is in use by process"):
        run({**raw, "checkpoint": {"path": str(tmp_path / "shared")}})
    for path in (None, "gs://bucket", str(tmp_path / "other/../runs")):
        cfg = load_config({**raw, "checkpoint": {"path": path}})
        assert locked_places(cfg.output, cfg.checkpoint.path) == {"output": raw["output"]}


def test_all_processes_wait_for_the_locks_of_process_0(tmp_path, monkeypatch):
    """On its host both settings may lead to one directory: a process with more locks would wait for another forever."""
    monkeypatch.setattr("jaxmem.training.directory.gather_objects", lambda mine: [{"output": "/there"}, mine])
    assert locked_places(str(tmp_path), str(tmp_path / "other")) == {"output": "/there"}


@pytest.mark.parametrize(("backend", "sees"), [("gpu", True), ("gpu", False), ("cpu", True)])
def test_programs_are_cached_where_all_hosts_see_them(tmp_path, monkeypatch, backend, sees):
    """Otherwise host 0 finds a program that the others compile, and XLA's autotuner waits for all hosts. Programs for
    CPUs are not cached."""
    cached = []
    module = "jaxmem.training.directory"
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(f"{module}.gather_objects", lambda mine: [mine, mine if isinstance(mine, str) else sees])
    monkeypatch.setattr(f"{module}.any_process", bool)
    monkeypatch.setattr(f"{module}.SHARED_SECONDS", 0)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    monkeypatch.setattr("jaxmem.training.run.gather_objects", lambda mine: [mine, mine])
    monkeypatch.setattr("jaxmem.training.run.cache_compiled_programs", cached.append)
    cfg = {"name": "x", "output": str(tmp_path / "runs"), "model": {"preset": "tiny"}, "train": {"steps": 1}}
    monkeypatch.setattr("jaxmem.training.run._preflight", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(cfg)
    assert cached == ([cfg["output"]] if sees and backend == "gpu" else [])
    assert not list((tmp_path / "runs").rglob("*"))


@pytest.mark.exhaustive
def test_a_killed_run_releases_the_lock(tmp_path):
    child = subprocess.Popen(
        [sys.executable, "-uc", HOLD, tmp_path],
        stdout=subprocess.PIPE,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    child.stdout.readline()
    with pytest.raises(UserError, match=f"process {child.pid} "):
        run_lock(tmp_path, "x").__enter__()
    child.send_signal(signal.SIGKILL)
    child.communicate()
    assert json.loads((tmp_path / ".x.lock").read_text())["process"] == child.pid  # it is still there
    with run_lock(tmp_path, "x"):
        pass


def test_a_file_system_without_locks_gives_a_warning(tmp_path, monkeypatch):
    def cannot(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", cannot)
    with run_lock(tmp_path, "x") as warning:
        assert warning == f"warning: {tmp_path} does not support file locks; do not start x twice at the same time"


def test_an_unwritable_directory(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"output: cannot write .*: Not a directory; set output to another directory"):
        run_lock(tmp_path / "file", "x").__enter__()


def test_a_lock_that_is_a_link_is_refused(tmp_path):
    (tmp_path / "elsewhere").write_text("kept")
    (tmp_path / ".x.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"output: cannot write .*\.x\.lock: Too many levels of symbolic links"):
        run_lock(tmp_path, "x").__enter__()
    assert (tmp_path / "elsewhere").read_text() == "kept"


@pytest.mark.parametrize("name", ["", "plan.json", "hf", "checkpoints", "wandb"])
@pytest.mark.parametrize("resume", ["auto", "never"])
def test_a_run_does_not_write_through_links(tmp_path, name, resume):
    elsewhere, directory = tmp_path / "elsewhere", tmp_path / "runs" / "x"
    elsewhere.mkdir()
    (elsewhere / "file").write_text("kept")
    link = directory / name
    link.parent.mkdir(parents=True)
    link.symlink_to(elsewhere)
    cfg = {
        "name": "x",
        "output": str(tmp_path / "runs"),
        "model": {"family": "mlp"},
        "objective": "classify",
        "data": {"source": "digits"},
        "batch": {"global_size": 8},
        "train": {"steps": 1},
        "checkpoint": {"resume": resume},
    }
    with pytest.raises(UserError, match=f"{link} is a symbolic link to {elsewhere}"):
        run(cfg, jax.devices()[:1])
    assert [file.name for file in elsewhere.iterdir()] == ["file"]
    assert link.is_symlink()


def test_links_that_wandb_has_made_are_left_alone(tmp_path):
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "latest-run").symlink_to("run-1")
    refuse_links(tmp_path)


def test_a_directory_that_cannot_be_created_is_named(tmp_path):
    cfg = load_config({"name": "x", "output": str(tmp_path), "model": {"preset": "tiny"}, "train": {"steps": 1}})
    with (
        pytest.raises(UserError, match=r"cannot create /proc/x: No such file .*; set output or checkpoint.path to"),
        run_directory(tmp_path / "x", epath.Path("/proc/x"), resume=cfg.checkpoint.resume),
    ):
        pass


def test_a_run_that_did_not_resume_is_resumed_by_its_directory(tmp_path):
    cfg = load_config(
        {"name": "x", "model": {"preset": "tiny"}, "train": {"steps": 1}, "checkpoint": {"resume": "never"}}
    )
    plan = SimpleNamespace(program=SimpleNamespace(cfg=cfg), as_json=dict, history=[])
    write_description(plan, tmp_path, is_new=True)
    assert load_config(tmp_path / "config.yaml") == cfg.replace(checkpoint={"resume": "auto"})


def test_a_run_that_starts_again_has_the_files_of_its_new_base(tmp_path, compare):
    """An earlier attempt of the same name may have had another base; a resumed run keeps its files."""
    folder = tmp_path / "run"
    folder.mkdir()

    def describe(base, *, is_new):
        model = {"preset": "tiny"} if base is None else {"hf": str(tmp_path / base)}
        cfg = load_config({"name": "x", "model": model, "train": {"steps": 1}})
        plan = SimpleNamespace(program=SimpleNamespace(cfg=cfg), as_json=dict, history=[])
        write_description(plan, folder, is_new=is_new)
        return (folder / "hf/config.json").read_bytes() if (folder / "hf").exists() else None

    for name in ("llama3", "mistral"):
        compare.write_directory(name, tmp_path / name)
    first = (tmp_path / "llama3/config.json").read_bytes()
    second = (tmp_path / "mistral/config.json").read_bytes()
    assert describe("llama3", is_new=True) == first
    assert describe("mistral", is_new=False) == first
    assert describe("mistral", is_new=True) == second
    assert describe(None, is_new=True) is None
    (folder / "hf").write_text("")
    with pytest.raises(NotADirectoryError, match=r"/hf'\)?$"):  # instead of keeping a stale tokenizer
        describe("llama3", is_new=True)
