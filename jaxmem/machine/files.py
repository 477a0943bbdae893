"""Files that are read whole if they are regular and not too large, or written whole or not at all."""

import os
import stat
import tempfile
from pathlib import Path

from jaxmem.errors import UserError

BLOCK_BYTES = 1 << 16


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
    """Writes a file so that it has its old or its new content at any moment. A link is replaced, not followed."""
    descriptor, partial = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:  # noqa: PTH123, a descriptor is not a path
            file.write(text)
            file.flush()
            os.fchmod(descriptor, 0o666 & ~umask())  # mkstemp gives permissions only to the owner
            os.fsync(descriptor)
        Path(partial).replace(path)
    finally:
        Path(partial).unlink(missing_ok=True)


def umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
