"""Rows of Parquet files, or of the Arrow files that `datasets` saves.

To read one row, a complete row group (Arrow: a record batch) is decoded. So the shuffle keeps row groups together
(`blocks`), and the last few row groups stay decoded. A row is one record of any length. If row groups are large or many
processes read the same row groups, run `jaxmem tokenize` first: it reads each row group once.
"""

import json
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxmem.data.records import EmptyDataError
from jaxmem.errors import UserError, nearest

MAX_DECODED_ROW_GROUPS = 4  # row groups that stay decoded
SPLITS = "dataset_dict.json"  # a file of `datasets` next to one directory per split


class ColumnRows:
    """The rows of files, with random access. `field`: the column of strings to read; None: all columns."""

    def __init__(self, paths: Sequence[Path], field: str | None) -> None:
        self._paths, self._field = paths, field
        splits = sorted({path.parent for path in paths if (path.parent.parent / SPLITS).is_file()})
        if len(splits) > 1:
            names = ", ".join(split.name for split in splits)
            raise UserError(f"{splits[0].parent}: contains the splits {names}; set data.path to one, e.g. {splits[0]}")
        self._opened = lru_cache(MAX_DECODED_ROW_GROUPS)(self._open)
        opened = [(file, group, rows) for file in range(len(paths)) for group, rows in enumerate(self._lengths(file))]
        self._groups = [(file, group) for file, group, rows in opened if rows]
        self.blocks = np.array([rows for _, _, rows in opened if rows], np.int64)
        if not self._groups:
            raise EmptyDataError(paths)
        self._ends = np.cumsum(self.blocks)
        self.decoded = lru_cache(MAX_DECODED_ROW_GROUPS)(self._decode)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return int(self._ends[-1])

    def record(self, index: int) -> dict[str, Any]:
        """A row. Values that JSON does not have, such as dates, are text."""
        group, row = self._find(index)
        with self._lock:
            table = self.decoded(group)
        values = {name: table.column(name)[row].as_py() for name in table.schema.names}
        found: dict[str, Any] = json.loads(json.dumps(values, default=str))
        return found

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
        return self._read(file, lambda opened: opened.lengths)

    def _decode(self, group: int) -> Any:
        file, number = self._groups[group]
        return self._read(file, lambda opened: opened.decode(number))

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

    def _open(self, file: int) -> "_RowGroups":
        path, columns = self._paths[file], [self._field] if self._field else None
        opened = (_open_parquet if path.suffix.lower() == ".parquet" else _open_arrow)(path, columns)
        if self._field is not None:
            if self._field not in opened.schema.names:
                hint = nearest(self._field, opened.schema.names)
                raise UserError(f"{path}: data.field={self._field} is not a column{hint}")
            if "string" not in (kind := str(opened.schema.field(self._field).type)):
                raise UserError(f"{path}: data.field={self._field} has type {kind}; use a column of strings")
        return opened


class _RowGroups(NamedTuple):
    """An open file: the number of rows of each row group (Arrow: record batch), and a function that decodes one."""

    schema: Any
    lengths: list[int]
    decode: Callable[[int], Any]


def _open_parquet(path: Path, columns: list[str] | None) -> _RowGroups:
    file = _pyarrow().parquet.ParquetFile(path)
    lengths = [file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups)]
    return _RowGroups(file.schema_arrow, lengths, partial(file.read_row_group, columns=columns))


def _open_arrow(path: Path, columns: list[str] | None) -> _RowGroups:
    """An Arrow file, as a stream of record batches or with an index of them. It is memory mapped."""
    arrow = _pyarrow()
    with path.open("rb") as file:
        has_index = file.read(6) == b"ARROW1"
    mapped = arrow.memory_map(str(path))
    reader = arrow.ipc.open_file(mapped) if has_index else arrow.ipc.open_stream(mapped)
    batches = reader.read_all().to_batches()
    lengths = [batch.num_rows for batch in batches]
    return _RowGroups(reader.schema, lengths, lambda group: batches[group].select(columns or reader.schema.names))


def _pyarrow() -> Any:
    try:
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise UserError("Parquet and Arrow files require pyarrow; run pip install 'jaxmem[parquet]'") from error
    return pyarrow
