"""One run at a time in a directory: two that wrote the same checkpoints would each destroy the other's.

The lock is the operating system's own (flock) on `output/.NAME.lock`, so it goes with the process that holds it,
however that ends: what a killed run leaves behind keeps nobody out. Of several processes the first one holds it. On a
shared file system it holds between hosts as far as that file system locks; one that cannot is said.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import jax

from jaxmem.distributed.agree import gather
from jaxmem.errors import UserError

CANNOT = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL)  # what file systems without locks answer


@contextmanager
def only_run(output: str | Path, name: str) -> Iterator[str | None]:
    """While it lasts, no other run is `output/name`. Gives what is to be said if the file system cannot lock."""
    held, refused, told = None, None, None
    path = Path(output, f".{name}.lock")
    if jax.process_index() == 0:
        try:
            held = _taken(path)
        except BlockingIOError:
            refused = f"{Path(output, name)}: {_holder(path)} is writing it; wait for it, or give another name"
        except OSError as error:
            if error.errno not in CANNOT:
                refused = f"output: cannot write {path}: {error.strerror}; give output another directory"
            told = f"{path.parent} cannot lock files: nothing keeps a second run out of {name}"
    try:
        if refused := gather(refused)[0]:
            raise UserError(refused)
        yield told
    finally:
        if held is not None:
            path.unlink(missing_ok=True)  # before it is let go, so that nobody takes it in between
            os.close(held)


def _taken(path: Path) -> int:
    """The open file that holds the lock."""
    with suppress(FileExistsError):  # what is no directory is told of by opening a file in it
        path.parent.mkdir(parents=True)
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is(path, file):
                os.ftruncate(file, 0)
                os.pwrite(file, json.dumps({"process": os.getpid(), "host": socket.gethostname()}).encode(), 0)
                return file
        except BaseException:
            os.close(file)
            raise
        os.close(file)  # whoever held it has removed it meanwhile


def _is(path: Path, file: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file))
    except FileNotFoundError:
        return False


def _holder(path: Path) -> str:
    try:
        holder = json.loads(path.read_text())
        return f"process {holder['process']} on {holder['host']}"
    except (OSError, ValueError, TypeError, KeyError):  # just begun, or just ended
        return "another run"
