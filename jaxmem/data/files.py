"""The files of data sources: a sorted list of paths, and reads of a part of a file.

Reads are `pread`s of a few kilobytes from descriptors that stay open while they are in use (at most 64, also for 10,000
small files). Unlike pages of a memory map they do not count as memory of the process: a run on 10 GB of data needs no
more memory than a run on 10 MB.
"""

import glob
import os
import weakref
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np

from jaxmem.config.hub import fetched_files, is_dataset, refuse_splits
from jaxmem.errors import UserError, nearest, one_of

OPEN_FILES = 64  # file descriptors that a source keeps open


def find_files(path: str | None, source: str, suffixes: Sequence[str] = ()) -> list[Path]:
    """The regular files that `path` (a file, a directory or a glob) names, in the same order in every locale.

    For a directory: all files below it that are not hidden and end with one of `suffixes` (if empty: all names). Such
    files of a dataset of the hub are fetched into its cache. Files with suffixes must be of one split.
    """
    if not path:
        raise UserError(f"data.source={source} requires data.path; set it to a file, a directory or a glob")
    if is_dataset(path):
        return fetched_files(path, tuple(suffixes))
    place = Path(path).expanduser()
    if place.is_file():
        return [place]
    if place.is_dir():
        named = (file for file in _below(place) if not suffixes or file.suffix.lower() in suffixes)
        files_found = [file for file in named if file.is_file()]
        problem = f"no file in this directory ends with {one_of(suffixes)}" if suffixes else "the directory is empty"
    elif glob.has_magic(path):
        names = glob.glob(str(place), recursive=True)  # noqa: PTH207 (Path.glob does not support absolute patterns)
        files_found = [file for file in map(Path, names) if file.is_file()]
        problem = "no file matches this pattern"
    else:
        raise UserError(f"data.path={path}: no such file or directory{_similar_name(place)}")
    if not files_found:
        raise UserError(f"data.path={path}: {problem}")
    if suffixes:  # a class of images may be named like a split, and so may an image
        is_images = source == "images"
        refuse_splits(path, sorted({f"{file.parent}/" if is_images else str(file) for file in files_found}))
    return sorted(files_found, key=os.fsencode)


def _below(root: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(root, followlinks=True):
        here = Path(folder).resolve()
        # A link to a directory that contains it has no end.
        folders[:] = [
            name
            for name in folders
            if not name.startswith(".") and not here.is_relative_to(Path(folder, name).resolve())
        ]
        yield from (Path(folder, name) for name in names if not name.startswith("."))


def _similar_name(path: Path) -> str:
    hint = nearest(path.name, [file.name for file in path.parent.iterdir()]) if path.parent.is_dir() else ""
    return hint if "did you mean" in hint else ""


def file_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error


def locate(ends: np.ndarray, index: int) -> tuple[int, int]:
    """The part that contains an index of concatenated parts, and the index within the part. `ends`: of the parts.

    >>> locate(np.array([3, 5]), 4)
    (1, 1)
    """
    part = int(np.searchsorted(ends, index, side="right"))
    return part, index - (int(ends[part - 1]) if part else 0)


def character_start(data: bytes, cut: int) -> int:
    """`cut`, or the start of the UTF-8 character that a cut there would split. For bytes that are not UTF-8: `cut`."""
    for start in range(cut, max(cut - 4, -1), -1):
        if start == len(data) or data[start] & 0xC0 != 0x80:
            return start
    return cut


class OpenFiles:
    """Reads parts of many files through few descriptors; safe to use from several threads."""

    def __init__(self) -> None:
        self._opened = lru_cache(OPEN_FILES)(_OpenFile)

    def read(self, path: Path, start: int, end: int) -> bytes:
        """The bytes [start, end) of a file; an error if the file has become shorter."""
        try:
            file = self._opened(path)
            parts = []
            while start < end and (part := os.pread(file.descriptor, end - start, start)):
                parts.append(part)
                start += len(part)
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}") from error
        if start < end:
            raise UserError(f"{path}: the file became shorter while it was in use; restore it, or start a new run")
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        self._opened.cache_clear()


class _OpenFile:
    """A descriptor, which is closed when no thread reads from it and the cache has dropped it."""

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self.descriptor)
