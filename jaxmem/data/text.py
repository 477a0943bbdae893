"""Documents that are files: any text, and the source code of Python's standard library.

A record is a document, or a piece of a document longer than `limit` bytes. Pieces have equal lengths and are cut
between characters, so that a huge file is read, shuffled and divided among rows like many small files. They follow from
the size of the file, so the index needs 8 bytes per file.
"""

import os
import sysconfig
from pathlib import Path

import numpy as np

from jaxmem.data.files import OpenFiles, character_start, file_size, locate
from jaxmem.data.records import DocumentPiece, EmptyDataError, InvalidRecordError, TokenizedText, piece_bytes
from jaxmem.data.tokenizer import Bytes
from jaxmem.errors import UserError

NOT_SOURCE = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


def stdlib_files() -> list[Path]:
    """The .py files of the standard library, without its tests: more than 10 MB on every supported Python."""
    root = sysconfig.get_paths()["stdlib"]
    files_found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in NOT_SOURCE]
        files = (Path(folder, name) for name in names if name.endswith(".py"))
        files_found += [file for file in files if os.access(file, os.R_OK)]
    if not files_found:
        raise UserError(
            f"data.source=stdlib: {root} has no source text of Python's standard library; "
            "use data.source=text with data.path"
        )
    return sorted(files_found, key=lambda file: os.fsencode(file.relative_to(root)))


class TextFiles(TokenizedText):
    """Each file is a document, unless it is empty."""

    default_files = staticmethod(stdlib_files)

    def open_files(self) -> None:
        limit = piece_bytes(self.data.sequence_length)
        sized = [(path, size) for path in self.paths if (size := file_size(path))]
        if not sized:
            raise EmptyDataError(self.paths)
        self.paths = [path for path, _ in sized]
        self.sizes = [size for _, size in sized]
        self._pieces = [-(-size // limit) for size in self.sizes]
        self._ends = np.cumsum(self._pieces, dtype=np.int64)
        self._files = OpenFiles()

    def __len__(self) -> int:
        return int(self._ends[-1])

    def _find(self, index: int) -> tuple[int, int, int]:
        """The file, the index of the piece, and the number of pieces."""
        file, piece = locate(self._ends, index)
        return file, piece, self._pieces[file]

    def piece(self, index: int) -> DocumentPiece:
        file, part, count = self._find(index)
        size = self.sizes[file]
        start = part * size // count
        end = (part + 1) * size // count
        # A cut inside a character moves back to its first byte: at most 3 bytes, the same at both ends.
        low = max(0, start - 3)
        high = min(size, end + 1)
        data = self._files.read(self.paths[file], low, high)
        content = data[character_start(data, start - low) : character_start(data, end - low)]
        text: bytes | str = content
        if not isinstance(self.tokenizer, Bytes):
            try:
                text = content.decode()
            except UnicodeDecodeError as error:
                raise InvalidRecordError(f"not UTF-8: {error}; only data.tokenizer=bytes reads it") from error
        return DocumentPiece(text, part == 0, part == count - 1)

    def where(self, index: int) -> str:
        file, piece, count = self._find(index)
        return f"{self.paths[file]}" + (f", part {piece + 1} of {count}" if count > 1 else "")

    def close(self) -> None:
        self._files.close()
