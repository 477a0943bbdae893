"""A lock that allows one run at a time per directory, since two runs would overwrite each other's checkpoints.

It is a lock of the operating system (flock) on `output/.NAME.lock`, which is released when the process ends in any way;
a lock file that a library creates and removes would remain after a killed run. Process 0 has the lock. On a shared file
system it applies to all hosts if the file system supports this; a file system without locks is reported.
"""

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

UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL)  # errors of file systems without locks


@contextmanager
def run_lock(output: str | Path, name: str) -> Iterator[str | None]:
    """A context that locks `output/name` for this run. Yields a warning if the file system has no locks."""
    lock, refusal, warning = None, None, None
    path = Path(output, f".{name}.lock")
    if jax.process_index() == 0:
        try:
            lock = _acquire(path)
        except BlockingIOError:
            refusal = f"{Path(output, name)} is in use by {_holder(path)}; wait for it, or set another name"
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                refusal = f"output: cannot write {path}: {error.strerror}; set output to another directory"
            warning = f"warning: {path.parent} does not support file locks: a second run of {name} is not prevented"
    try:
        if refusal := gather(refusal)[0]:
            raise UserError(refusal)
        yield warning
    finally:
        if lock is not None:
            path.unlink(missing_ok=True)  # before it is released, so that no other process acquires it in between
            os.close(lock)


def _acquire(path: Path) -> int:
    """The file descriptor of the lock."""
    with suppress(FileExistsError):  # a parent that is a file is reported by open
        path.parent.mkdir(parents=True)
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
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
        os.close(file)  # the process that had it removed it meanwhile


def _holder(path: Path) -> str:
    try:
        holder = json.loads(path.read_text())
        return f"process {holder['process']} on {holder['host']}"
    except (OSError, ValueError, TypeError, KeyError):  # the other run has just started or ended
        return "another run"
