"""Files that are read whole if they are regular and not too large; files and directories that are written whole or not
at all; and errors of the operating system as errors that a user can correct."""

import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jaxmem.errors import UserError

BLOCK_BYTES = 1 << 16
# Errors of system calls for files and directories that cannot be used, and for limits of the machine.
_OF_THE_MACHINE = (
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ELOOP),
    *(errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ESTALE),
)
_MORE_FILES = "too many open files: raise the limit with `ulimit -n 4096`"


def read_file(file: Path, limit: int) -> bytes:
    """The content of a regular file of at most `limit` bytes. A FIFO or a device may have no end, and opening a FIFO
    waits for another process, so these are refused."""
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(descriptor, "rb") as opened:  # noqa: PTH123, a descriptor is not a path
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise UserError(f"{file}: is not a regular file; put the file itself in its place")
        content = bytearray()
        # In blocks, since `read(limit)` allocates all of the limit first.
        while max(len(content), status.st_size) <= limit and (block := opened.read(BLOCK_BYTES)):
            content += block
    if max(len(content), status.st_size) > limit:
        raise UserError(f"{file}: larger than the limit of {limit >> 20} MiB for such files; replace this file")
    return bytes(content)


def write_file(path: Path, text: str) -> None:
    """Writes a file, and its directory if it is missing, so that it has its old or its new content at any moment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """A temporary file next to `path`. It replaces `path` at the end, or is removed after an error. A link is replaced,
    not followed."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(descriptor)
    unfinished = Path(name)
    try:
        yield unfinished
        with unfinished.open("rb") as opened:
            os.fsync(opened.fileno())
        unfinished.chmod(0o666 & ~umask())  # mkstemp gives permissions only to the owner
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


@contextmanager
def atomic_directory(directory: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary directory next to `directory`. It is renamed to `directory` at the end, or removed after an error."""
    target = Path(directory).expanduser()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target} exists already; remove it, or use another directory")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{target.name}.unfinished-", dir=target.parent))
    except OSError as error:
        raise UserError(f"cannot write {target}: {error.strerror}") from error
    try:
        yield unfinished
        for file in unfinished.rglob("*"):
            if file.is_file():
                with file.open("rb") as opened:
                    os.fsync(opened.fileno())
        unfinished.chmod(0o777 & ~umask())  # mkdtemp gives permissions only to the owner
        unfinished.rename(target)
    except OSError as error:
        raise UserError(f"cannot write {target}: {error.strerror}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def as_user_error(error: BaseException) -> BaseException:
    """A UserError if the cause is the machine (a directory that cannot be written, a full disk, too few file
    descriptors), otherwise the error itself."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in _OF_THE_MACHINE:
            if cause.errno in (errno.EMFILE, errno.ENFILE):
                return UserError(_MORE_FILES)
            if isinstance(error, UserError):  # explains the system's message
                return error
            return UserError(f"{cause.filename}: {cause.strerror}" if cause.filename else str(cause.strerror))
        if not isinstance(cause, UserError) and os.strerror(errno.EMFILE) in str(cause):  # from a library in C++
            return UserError(_MORE_FILES)
        cause = cause.__cause__
    return error
