"""Documents that are rows of Parquet files, or of the Arrow files that `datasets` saves.

To read one row, a complete row group (Arrow: a record batch) is decoded. So the shuffle keeps row groups together
(`blocks`), and the last few row groups stay decoded. A row is one record of any length. If row groups are large or many
processes read the same row groups, run `jaxmem tokenize` first: it reads each row group once.
"""

import json
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from jaxmem.config.sections import Data, Source
from jaxmem.config.sources import COLUMNS
from jaxmem.data.records import DocumentPiece, EmptyDataError, InvalidRecordError, TokenizedText
from jaxmem.data.tokenizer import Tokenizer
from jaxmem.errors import UserError, nearest

DECODED = 4  # row groups that stay decoded
SPLITS = "dataset_dict.json"  # a file of `datasets` next to one directory per split


def is_columns(paths: Sequence[Path]) -> bool:
    return paths[0].suffix.lower() in COLUMNS


class ColumnRecords:
    """The rows of files, with random access. `field`: the column of strings to read; None: all columns."""

    def __init__(self, paths: Sequence[Path], field: str | None = None) -> None:
        self._paths, self._field = paths, field
        splits = sorted({path.parent for path in paths if (path.parent.parent / SPLITS).is_file()})
        if len(splits) > 1:
            names = ", ".join(split.name for split in splits)
            raise UserError(f"{splits[0].parent}: contains the splits {names}; set data.path to one, e.g. {splits[0]}")
        self._opened = lru_cache(DECODED)(self._open)
        opened = [(file, group, rows) for file in range(len(paths)) for group, rows in enumerate(self._lengths(file))]
        self._groups = [(file, group) for file, group, rows in opened if rows]
        self.blocks = np.array([rows for _, _, rows in opened if rows], np.int64)
        if not self._groups:
            raise EmptyDataError(paths)
        self._ends = np.cumsum(self.blocks)
        self.decoded = lru_cache(DECODED)(self._decode)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return int(self._ends[-1])

    def row(self, index: int) -> dict[str, Any]:
        group, row = self._find(index)
        with self._lock:
            table = self.decoded(group)
        return {name: table.column(name)[row].as_py() for name in table.schema.names}

    def line(self, index: int) -> bytes:
        """A row as a line of JSON."""
        return json.dumps(self.row(index), ensure_ascii=False, default=str).encode()

    def where(self, index: int) -> str:
        group, row = self._find(index)
        file, number = self._groups[group]
        return f"{self._paths[file]}, row group {number}, row {row}"

    def close(self) -> None:
        self.decoded.cache_clear()
        self._opened.cache_clear()

    def _find(self, index: int) -> tuple[int, int]:
        group = int(np.searchsorted(self._ends, index, side="right"))
        return group, index - int(self._ends[group] - self.blocks[group])

    def _lengths(self, file: int) -> list[int]:
        """The number of rows of each row group."""
        return self._read(file, lambda opened: [opened.length(group) for group in range(opened.groups)])

    def _decode(self, group: int) -> Any:
        file, number = self._groups[group]
        return self._read(file, lambda opened: opened.decode(number, self._field))

    def _read(self, file: int, read: Callable[[Any], Any]) -> Any:
        path = self._paths[file]
        try:
            return read(self._opened(file))
        except (OSError, ValueError) as error:  # pyarrow's own errors are kinds of ValueError
            is_parquet = path.suffix.lower() == ".parquet"
            known = is_parquet or path.suffix.lower() == ".arrow"
            use = "copy it again" if known else "set data.source to the format of the file"
            kind = "parquet" if is_parquet else "arrow"
            raise UserError(f"{path}: not a valid {kind} file: {error}; {use}") from error

    def _open(self, file: int) -> Any:
        path = self._paths[file]
        opened = (_Parquet if path.suffix.lower() == ".parquet" else _Arrow)(path)
        self._check(path, opened.schema)
        return opened

    def _check(self, path: Path, schema: Any) -> None:
        if self._field is None:
            return
        if self._field not in schema.names:
            raise UserError(f"{path}: data.field={self._field} is not a column{nearest(self._field, schema.names)}")
        if "string" not in (kind := str(schema.field(self._field).type)):
            raise UserError(f"{path}: data.field={self._field} has type {kind}; use a column of strings")


class _Parquet:
    def __init__(self, path: Path) -> None:
        self._file = _pyarrow("parquet").ParquetFile(path)
        self.schema, self.groups = self._file.schema_arrow, self._file.metadata.num_row_groups

    def length(self, group: int) -> int:
        return int(self._file.metadata.row_group(group).num_rows)

    def decode(self, group: int, field: str | None) -> Any:
        return self._file.read_row_group(group, columns=field and [field])


class _Arrow:
    """An Arrow file, as a stream of record batches or with an index of them. It is memory mapped."""

    def __init__(self, path: Path) -> None:
        arrow = _pyarrow("ipc")
        with path.open("rb") as file:
            has_index = file.read(6) == b"ARROW1"
        mapped = _pyarrow("").memory_map(str(path))
        reader = arrow.open_file(mapped) if has_index else arrow.open_stream(mapped)
        self._batches = reader.read_all().to_batches()
        self.schema, self.groups = reader.schema, len(self._batches)

    def length(self, group: int) -> int:
        return int(self._batches[group].num_rows)

    def decode(self, group: int, field: str | None) -> Any:
        return self._batches[group].select([field]) if field else self._batches[group]


class ColumnTexts(TokenizedText):
    """The documents in one column."""

    def __init__(self, paths: Sequence[Path], source: Source, data: Data, tokenizer: Tokenizer) -> None:
        super().__init__(paths, source, data, tokenizer)
        self.rows = ColumnRecords(paths, source.field)
        self.blocks = self.rows.blocks

    def __len__(self) -> int:
        return len(self.rows)

    def piece(self, index: int) -> DocumentPiece:
        text = self.rows.row(index)[self.source.field]
        if text is None:
            raise InvalidRecordError(f"{self.source.field} is null")
        return DocumentPiece(text, True, True)

    def where(self, index: int) -> str:
        return self.rows.where(index)

    def close(self) -> None:
        self.rows.close()


def _pyarrow(module: str) -> Any:
    try:
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise UserError("Parquet and Arrow files require pyarrow; run pip install 'jaxmem[parquet]'") from error
    return getattr(pyarrow, module) if module else pyarrow
