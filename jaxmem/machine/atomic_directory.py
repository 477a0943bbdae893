"""A directory that is there whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jaxmem.errors import UserError


@contextmanager
def written_whole(directory: str | os.PathLike[str]) -> Iterator[Path]:
    """A place beside `directory` to write to, which takes its name when all is done: what fails leaves nothing."""
    target = Path(directory).expanduser()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target} exists already; remove it or choose another directory")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{target.name}.unfinished-", dir=target.parent))
    except OSError as error:
        raise UserError(f"{target}: cannot be written: {error.strerror}") from error
    try:
        yield unfinished
        for file in unfinished.rglob("*"):
            if file.is_file():
                with file.open("rb") as opened:
                    os.fsync(opened.fileno())
        unfinished.chmod(0o777 & ~_umask())  # mkdtemp's is for the owner alone
        unfinished.rename(target)
    except OSError as error:
        raise UserError(f"{target}: cannot be written: {error.strerror}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
