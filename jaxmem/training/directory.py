"""The directory of a run: locked, created, and described by files.

The lock allows one run at a time, since two runs would overwrite each other's checkpoints. It is a lock of the
operating system (flock) on `output/.NAME.lock`, which is released when the process ends for any reason; a lock that
consists of a file would remain after a killed run. A second lock is in `checkpoint.path`. Process 0 has the locks.
On a shared file system they apply to all hosts if the file system supports this; a file system without locks is
reported.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import jax
from etils import epath

from jaxmem.checkpoint.paths import move_aside
from jaxmem.config import Decoder
from jaxmem.config.load import save_config
from jaxmem.distributed.agree import any_process, gather_objects
from jaxmem.errors import UserError
from jaxmem.machine.files import atomic_directory, write_file

if TYPE_CHECKING:
    from jaxmem.planning.result import Plan

MAX_WAIT_SECONDS = 60  # seconds until a directory that one host created must be visible to the other hosts
SHARED_SECONDS = 5  # the same for a file, to share a cache
UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL)  # errors of file systems without locks


@contextmanager
def run_lock(output: str | Path, name: str, key: str = "output") -> Iterator[str | None]:
    """A context that locks `output/name` for this run. Yields a warning if the file system has no locks. `key`: the
    setting that names `output`."""
    lock = None
    refusal = None
    warning = None
    path = Path(output, f".{name}.lock")
    if jax.process_index() == 0:
        try:
            lock = _acquire(path)
        except BlockingIOError:
            holder = "another run"
            with suppress(OSError, ValueError, TypeError, KeyError):  # the other run has just started or ended
                holder = "process {process} on {host}".format(**json.loads(path.read_text()))
            refusal = f"{Path(output, name)} is in use by {holder}; wait until it ends, or set another name"
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                refusal = f"{key}: cannot write {path}: {error.strerror}; set {key} to another directory"
            warning = f"warning: {path.parent} does not support file locks; do not start {name} twice at the same time"
    try:
        if refusal := gather_objects(refusal)[0]:
            raise UserError(refusal)
        yield warning
    finally:
        if lock is not None:
            path.unlink(missing_ok=True)  # before the lock is released, so that no other process acquires it in between
            os.close(lock)


def locked_places(output: str, checkpoints: str | None) -> dict[str, str]:
    """The setting and the directory of each place in which a run is locked: that of its files and, unless it is a
    bucket, that of its checkpoints, which runs with another `output` may share. They are those of process 0, which has
    the locks, because links may lead elsewhere on another host."""
    places = {"output": output, "checkpoint.path": checkpoints or output}
    local = {key: place for key, place in places.items() if "://" not in place}
    differ = len(set(map(os.path.realpath, local.values()))) == len(local)
    return gather_objects(local if differ else {"output": output})[0]


def _acquire(path: Path) -> int:
    """The file descriptor of the lock."""
    with suppress(FileExistsError):  # a parent that is a file is reported by open
        path.parent.mkdir(parents=True)
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with suppress(FileNotFoundError):
                if os.path.samestat(path.stat(), os.fstat(file)):
                    os.ftruncate(file, 0)
                    os.pwrite(file, json.dumps({"process": os.getpid(), "host": socket.gethostname()}).encode(), 0)
                    return file
        except BaseException:
            os.close(file)
            raise
        os.close(file)  # the process that had the lock has removed the file


def is_shared(directory: Path) -> bool:
    """Whether all processes see this directory, in which process 0 creates a file for a moment."""
    if jax.process_count() == 1:
        return True
    marker = directory / gather_objects(f".{uuid.uuid4().hex}")[0]
    if jax.process_index() == 0:
        with suppress(OSError):  # nobody sees the file
            directory.mkdir(parents=True, exist_ok=True)
            marker.touch()
    gather_objects(None)  # waits, because a network file system may remember that the file did not exist
    blind = _blind_processes(marker, SHARED_SECONDS)
    if jax.process_index() == 0:
        marker.unlink(missing_ok=True)
    return not blind


def _blind_processes(path: Path | epath.Path, seconds: float) -> list[int]:
    """The processes that do not see a path within this time: a network file system may show it later."""
    end = time.monotonic() + seconds
    while blind := [process for process, sees in enumerate(gather_objects(path.exists())) if not sees]:
        if any_process(time.monotonic() > end):
            break
        time.sleep(1)
    return blind


@contextmanager
def run_directory(
    directory: Path, path: epath.Path, *, resume: Literal["auto", "never"]
) -> Iterator[Callable[[], None]]:
    """A context with the directories of a run and of its checkpoints, which all processes must see. New directories are
    removed if the run fails before it calls the function that this yields. `resume`: `never` moves old ones aside."""
    if resume == "never":
        move_aside(directory)
        move_aside(path)
    new = [folder for folder in (epath.Path(directory), path) if not folder.exists()]
    try:
        refusal = None
        if jax.process_index() == 0:
            try:
                path.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                refusal = f"cannot create {path}: {error.strerror}; set output or checkpoint.path to another directory"
        if refusal := gather_objects(refusal)[0]:
            raise UserError(refusal)
        if blind := _blind_processes(path, MAX_WAIT_SECONDS):
            raise UserError(
                f"process {', '.join(map(str, blind))} does not see {path}, which process 0 created; "
                "set output or checkpoint.path to a directory that all hosts share"
            )
        yield new.clear
    except BaseException:
        for folder in new if jax.process_index() == 0 else ():
            folder.rmtree(missing_ok=True)
        raise


def write_description(plan: Plan, directory: Path, *, is_new: bool) -> None:
    """Writes the config, the plan, and the settings and tokenizer of `model.hf`, so that the run can be used without
    that directory. `is_new`: the run starts at step 0, so files of an earlier attempt are replaced."""
    from jaxmem.inference.load import HF_FOLDER

    cfg = plan.program.cfg
    # `checkpoint.resume: never` is about this start; `jaxmem train RUN` resumes the run.
    save_config(cfg.replace(checkpoint={"resume": "auto"}), directory / "config.yaml")
    write_file(directory / "plan.json", json.dumps(plan.as_json(), indent=2) + "\n")
    write_file(directory / "memory.json", json.dumps(plan.history) + "\n")
    hf_files = directory / HF_FOLDER
    if is_new and hf_files.exists():
        shutil.rmtree(hf_files)
    if isinstance(cfg.model, Decoder) and cfg.model.hf is not None and not hf_files.exists():
        from jaxmem import hf

        with atomic_directory(hf_files) as place:
            hf.copy_metadata(cfg.model.hf, place)
