"""Rows of Parquet files, or of the Arrow files that `datasets` saves.

To read one row, a complete row group (Arrow: a record batch) is decoded. So the shuffle keeps row groups together
(`blocks`), and the last few row groups stay decoded. If row groups are large or many processes read the same row
groups, run `jaxmem tokenize` first: it reads each row group once.

Files may come from anywhere, and pyarrow trusts them: an offset outside of its buffer ends the process. So a decoded
row group is validated before a value is read, and its memory is limited while it is decoded.
"""

import json
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxmem.data.files import locate
from jaxmem.data.records import EmptyDataError, InvalidRecordError
from jaxmem.errors import UserError, nearest
from jaxmem.typing import JsonDict

MAX_DECODED_ROW_GROUPS = 4  # row groups that stay decoded
MAX_DECODED_BYTES = 4 << 30  # largest size of a decoded row group
MAX_ROW_BYTES = 16 << 20  # largest size of a row, as of a line of JSON
BATCH_ROWS = 64  # rows that are decoded before the memory is compared with its limit
SPLITS = "dataset_dict.json"  # a file of `datasets` next to one directory per split


class ColumnRows:
    """The rows of files, with random access. `field`: the column of strings to read; None: all columns."""

    def __init__(self, paths: Sequence[Path], field: str | None) -> None:
        self._paths = paths
        self._field = field
        splits = sorted({path.parent for path in paths if (path.parent.parent / SPLITS).is_file()})
        if len(splits) > 1:
            names = ", ".join(split.name for split in splits)
            raise UserError(f"{splits[0].parent}: contains the splits {names}; set data.path to one, e.g. {splits[0]}")
        self._opened = lru_cache(MAX_DECODED_ROW_GROUPS)(self._open)
        lengths = [self._read(file, lambda opened: opened.lengths) for file in range(len(paths))]
        groups = [(file, group, rows) for file, of_file in enumerate(lengths) for group, rows in enumerate(of_file)]
        self._groups = [(file, group) for file, group, rows in groups if rows]
        self.blocks = np.array([rows for _, _, rows in groups if rows], np.int64)
        if not self._groups:
            raise EmptyDataError(paths)
        self._ends = np.cumsum(self.blocks)
        self.decoded = lru_cache(MAX_DECODED_ROW_GROUPS)(self._decode)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return int(self._ends[-1])

    def names(self) -> list[str]:
        """The columns of the first file."""
        return list(self._read(0, lambda opened: opened.schema.names))

    def record(self, index: int) -> JsonDict:
        """A row. Values that JSON does not have, such as dates, are text; bytes that are not text are null. Fields of
        objects that are null are left out: all objects of a column have the same fields, so a field that an object
        lacks is null in the file."""
        group, row = locate(self._ends, index)
        with self._lock:
            table = self.decoded(group).slice(row, 1)
        if table.nbytes > MAX_ROW_BYTES:
            raise InvalidRecordError(f"the row is larger than the limit of {MAX_ROW_BYTES >> 20} MiB; split it")
        try:
            values = {name: table.column(name)[0].as_py() for name in table.schema.names}
        except UnicodeDecodeError as error:
            raise InvalidRecordError(f"a string is not UTF-8: {error}") from error
        return {name: _without_nulls(value) for name, value in json.loads(json.dumps(values, default=_text)).items()}

    def where(self, index: int) -> str:
        group, row = locate(self._ends, index)
        file, number = self._groups[group]
        return f"{self._paths[file]}, row group {number}, row {row}"

    def close(self) -> None:
        self.decoded.cache_clear()
        self._opened.cache_clear()

    def _decode(self, group: int) -> Any:
        """The table of a row group."""
        file, number = self._groups[group]
        return self._read(file, lambda opened: _decoded(opened, number))

    def _read(self, file: int, read: Callable[[Any], Any]) -> Any:
        try:
            return read(self._opened(file))
        except (OSError, ValueError, _pyarrow().ArrowException) as error:
            path = self._paths[file]
            kind = "parquet" if path.suffix.lower() == ".parquet" else "arrow"
            use = "copy it again, or set data.source to the format of the file"
            raise UserError(f"{path}: not a valid {kind} file: {error}; {use}") from error

    def _open(self, file: int) -> "_RowGroups":
        path = self._paths[file]
        columns = [self._field] if self._field else None
        opened = (_open_parquet if path.suffix.lower() == ".parquet" else _open_arrow)(path, columns)
        if min(opened.lengths, default=0) < 0 or sum(opened.lengths) > sys.maxsize:
            raise ValueError("it states impossible numbers of rows")
        if self._field is not None:
            if self._field not in opened.schema.names:
                hint = nearest(self._field, opened.schema.names)
                raise UserError(f"{path}: data.field={self._field} is not a column{hint}")
            kind = str(opened.schema.field(self._field).type)
            if "string" not in kind:
                raise UserError(f"{path}: data.field={self._field} has type {kind}; use a column of strings")
        return opened


def _text(value: object) -> str | None:
    """A value that JSON does not have. Some programs write text as bytes, without its type."""
    if not isinstance(value, bytes):
        return str(value)
    try:
        return value.decode()
    except UnicodeDecodeError:
        return None


def _without_nulls(value: Any) -> Any:
    match value:
        case dict():
            return {key: _without_nulls(field) for key, field in value.items() if field is not None}
        case list():
            return [_without_nulls(item) for item in value]
    return value


class _RowGroups(NamedTuple):
    """An open file: the number of rows of each row group (Arrow: record batch), and a function that decodes one as
    several record batches."""

    schema: Any
    lengths: list[int]
    decode: Callable[[int], Iterable[Any]]


def _decoded(file: _RowGroups, group: int) -> Any:
    """The table of a row group."""
    arrow = _pyarrow()
    before = arrow.total_allocated_bytes()
    batches = []
    for batch in file.decode(group):
        if arrow.total_allocated_bytes() - before > MAX_DECODED_BYTES:
            limit = f"the limit of {MAX_DECODED_BYTES >> 30} GiB"
            raise arrow.ArrowInvalid(f"row group {group} needs more memory than {limit} when it is decoded")
        for column in batch.columns:  # refuses offsets and lengths outside of the buffers
            column.view(_without_encoding(column.type)).validate(full=True)
        batches.append(batch)
    table = arrow.Table.from_batches(batches, batches[0].schema if batches else file.schema)
    if len(table) != file.lengths[group]:
        raise arrow.ArrowInvalid(f"row group {group} contains {len(table)} rows, not {file.lengths[group]} as stated")
    return table


def _without_encoding(kind: Any) -> Any:
    """A type with the same buffers, whose strings are binary, because a string that is not UTF-8 makes only its row
    invalid."""
    arrow = _pyarrow()
    types = arrow.types
    if types.is_string(kind):
        return arrow.binary()
    if types.is_large_string(kind):
        return arrow.large_binary()
    if types.is_string_view(kind):
        return arrow.binary_view()
    if types.is_dictionary(kind):
        return arrow.dictionary(kind.index_type, _without_encoding(kind.value_type), kind.ordered)
    if types.is_struct(kind):
        return arrow.struct([field.with_type(_without_encoding(field.type)) for field in kind])
    if types.is_map(kind):
        return arrow.map_(_without_encoding(kind.key_type), _without_encoding(kind.item_type), kind.keys_sorted)
    for is_kind, of in ((types.is_list, arrow.list_), (types.is_large_list, arrow.large_list)):
        if is_kind(kind):
            return of(kind.value_field.with_type(_without_encoding(kind.value_type)))
    if types.is_fixed_size_list(kind):
        return arrow.list_(kind.value_field.with_type(_without_encoding(kind.value_type)), kind.list_size)
    return kind


def _open_parquet(path: Path, columns: list[str] | None) -> _RowGroups:
    file = _pyarrow().parquet.ParquetFile(path)
    lengths = [file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups)]
    return _RowGroups(file.schema_arrow, lengths, lambda group: file.iter_batches(BATCH_ROWS, [group], columns))


def _open_arrow(path: Path, columns: list[str] | None) -> _RowGroups:
    """An Arrow file, as a stream of record batches or with an index of them. It is memory mapped."""
    arrow = _pyarrow()
    with path.open("rb") as file:
        has_index = file.read(6) == b"ARROW1"
    mapped = arrow.memory_map(str(path))
    reader = arrow.ipc.open_file(mapped) if has_index else arrow.ipc.open_stream(mapped)
    batches = reader.read_all().to_batches()
    lengths = [batch.num_rows for batch in batches]
    return _RowGroups(reader.schema, lengths, lambda group: [batches[group].select(columns or reader.schema.names)])


def _pyarrow() -> Any:
    try:
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise UserError("Parquet and Arrow files require pyarrow; run pip install 'jaxmem[parquet]'") from error
    return pyarrow
