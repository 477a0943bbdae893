"""Documents that are rows of parquet files, read a row group at a time.

Parquet has no cheap access to one row: a row group is decoded completely. So the shuffle keeps row groups together
(`blocks`) and a few row groups stay decoded. A row is one record, however long. If row groups are large or many
processes read the same ones, run `jaxmem tokenize` first: it reads each once.
"""

import threading
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from jaxmem.config.sections import Data, Source
from jaxmem.data.records import DocumentPiece, InvalidRecordError, TokenizedText, no_documents
from jaxmem.data.tokenizer import Tokenizer
from jaxmem.errors import UserError, nearest

DECODED = 4  # row groups that stay decoded


class ParquetRows(TokenizedText):
    """The documents in one column of parquet files."""

    def __init__(self, paths: Sequence[Path], source: Source, data: Data, tokenizer: Tokenizer) -> None:
        super().__init__(paths, source, data, tokenizer)
        self._parquet, self.field = _pyarrow(), source.field
        groups = [(i, g, rows) for i in range(len(paths)) for g, rows in enumerate(self._group_lengths(i))]
        self._groups = [(file, group) for file, group, rows in groups if rows]
        self.blocks = np.array([rows for _, _, rows in groups if rows], np.int64)
        if not self._groups:
            raise no_documents(paths)
        self._ends = np.cumsum(self.blocks)
        self._column = lru_cache(DECODED)(self._decode)
        self._lock = threading.Lock()

    def _group_lengths(self, file: int) -> list[int]:
        path = self.paths[file]
        with self._open(path) as opened:
            names = opened.schema_arrow.names
            if self.field not in names:
                raise UserError(f"{path}: data.field={self.field} is not a column{nearest(self.field, names)}")
            kind = str(opened.schema_arrow.field(self.field).type)
            if "string" not in kind:
                raise UserError(f"{path}: data.field={self.field} has type {kind}; use a column of strings")
            metadata = opened.metadata
            return [metadata.row_group(g).num_rows for g in range(metadata.num_row_groups)]

    def _open(self, path: Path) -> Any:
        try:
            return self._parquet.ParquetFile(path)
        except (OSError, ValueError) as error:  # pyarrow's own errors are kinds of ValueError
            raise UserError(f"{path}: not a valid Parquet file: {error}") from error

    def __len__(self) -> int:
        return int(self._ends[-1])

    def piece(self, index: int) -> DocumentPiece:
        group = int(np.searchsorted(self._ends, index, side="right"))
        with self._lock:
            column = self._column(group)
        text = column[index - int(self._ends[group]) + len(column)].as_py()
        if text is None:
            raise InvalidRecordError(f"{self.field} is null")
        return DocumentPiece(text, True, True)

    def _decode(self, group: int) -> Any:
        file, number = self._groups[group]
        try:
            with self._open(self.paths[file]) as opened:
                return opened.read_row_group(number, columns=[self.field]).column(0)
        except (OSError, ValueError) as error:
            raise UserError(f"{self.paths[file]}, row group {number}: cannot be read: {error}") from error

    def where(self, index: int) -> str:
        group = int(np.searchsorted(self._ends, index, side="right"))
        file, number = self._groups[group]
        row = index - int(self._ends[group]) + int(np.diff(self._ends, prepend=0)[group])
        return f"{self.paths[file]}, row group {number}, row {row}"

    def close(self) -> None:
        self._column.cache_clear()


def _pyarrow() -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise UserError("data.source=parquet requires pyarrow; run pip install 'jaxmem[parquet]'") from error
    return pyarrow.parquet
