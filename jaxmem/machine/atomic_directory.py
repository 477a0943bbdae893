"""Writes a directory atomically: it appears complete or not at all. No dependency of jaxmem has this for
directories."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jaxmem.errors import UserError
from jaxmem.machine.files import umask


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
