"""Documents that are lines of JSON: `{"text": "..."}`, one document per line.

One pass over the files at the speed of the disk finds the lines; a line is parsed when its record is read. The index
contains one line per 16 KiB of file: 10 GB need about 20 MB of memory for any length of lines. Reading a record reads
the 16 KiB around it.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxmem.config.sections import COLUMNS
from jaxmem.data.columns import ColumnRows
from jaxmem.data.files import OpenFiles, file_size
from jaxmem.data.records import DocumentPiece, EmptyDataError, InvalidRecordError, RecordSource, TokenizedText
from jaxmem.errors import UserError, as_yaml
from jaxmem.typing import JsonDict

BLOCK_BYTES = 16 * 1024  # from one mark of the index of lines to the next
CHUNK_BYTES = 1 << 20  # read at once to find the lines
MAX_LINE_BYTES = 16 << 20  # largest size of a line in bytes; a parsed line may need twenty times this memory
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
NOT_EMPTY = re.compile(rb"[^\n]+")
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class Lines:
    """The lines of JSONL files that are not empty."""

    blocks = None

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._sizes = [file_size(path) for path in paths]
        self._files = OpenFiles()
        self._length = 0
        marks = []
        for file in range(len(paths)):
            marks_of_file, records = self._scan(file)
            marks.append(marks_of_file + np.array([self._length, 0, 0, 0]))
            self._length += records
        if not self._length:
            raise EmptyDataError(paths)
        # The first line of each block in which one begins: [record, file, line, offset].
        self._marks = np.concatenate(marks)

    def __len__(self) -> int:
        return self._length

    def record(self, index: int) -> JsonDict:
        _, _, line = self._find(index)
        if len(line) > MAX_LINE_BYTES:
            raise InvalidRecordError(f"the line is longer than the limit of {MAX_LINE_BYTES >> 20} MiB; split it")
        return parse_object(line)

    def where(self, index: int) -> str:
        file, number, _ = self._find(index)
        return f"{self._paths[file]}, line {number + 1}"

    def close(self) -> None:
        self._files.close()

    def _find(self, index: int) -> tuple[int, int, bytes]:
        """The file of a record, the number of its line, and the line."""
        mark = int(np.searchsorted(self._marks[:, 0], index, side="right")) - 1
        first_record, file, first_line, start = self._marks[mark].tolist()
        # The line starts within BLOCK_BYTES of the mark.
        end = min(start + BLOCK_BYTES + MAX_LINE_BYTES + 1, self._sizes[file])
        if mark + 1 < len(self._marks) and self._marks[mark + 1, 1] == file:
            end = min(end, int(self._marks[mark + 1, 3]))
        content = self._files.read(self._paths[file], start, end)
        lines = (line for line in NOT_EMPTY.finditer(content) if line[0] != b"\r")  # found one by one
        line = next(itertools.islice(lines, index - first_record, None))
        return file, first_line + content.count(b"\n", 0, line.start()), line[0]

    def _scan(self, file: int) -> tuple[np.ndarray, int]:
        """The marks of a file, whose records are counted from 0, and the number of its records."""
        size = self._sizes[file]
        marks = [np.zeros((0, 4), np.int64)]
        records = lines = line_start = 0
        block = -1
        last_byte = 0
        for base in range(0, size, CHUNK_BYTES):
            content = self._files.read(self._paths[file], base, min(base + CHUNK_BYTES, size))
            chunk = np.frombuffer(content, np.uint8)
            ends = np.flatnonzero(chunk == ord("\n"))
            before = np.where(ends > 0, chunk[ends - 1], last_byte)  # the byte before the line's end
            last_byte = int(chunk[-1])
            ends += base
            if base + len(chunk) == size and last_byte != ord("\n"):  # the last line has no line break
                ends = np.append(ends, size)
                before = np.append(before, last_byte)
            if not len(ends):
                continue
            starts = np.concatenate(([line_start], ends[:-1] + 1))
            lengths = ends - starts
            full = np.flatnonzero((lengths > 1) | ((lengths == 1) & (before != ord("\r"))))
            blocks = starts[full] // BLOCK_BYTES
            is_first = np.diff(blocks, prepend=block) > 0
            numbers = np.arange(records, records + len(full))
            columns = (numbers, np.full(len(full), file), lines + full, starts[full])
            marks.append(np.stack(columns, axis=1)[is_first])
            records += len(full)
            lines += len(ends)
            line_start = int(ends[-1]) + 1
            block = int(blocks[-1]) if len(blocks) else block
        return np.concatenate(marks), records


class JsonRecords(RecordSource):
    """Records that are objects: lines of JSON, or rows of Parquet and Arrow files."""

    reads_field = False  # whether only the column `source.field` is read

    def open_files(self) -> None:
        field = self.source.field if self.reads_field else None
        is_columns = self.paths[0].suffix.lower() in COLUMNS or self.source.source in ("parquet", "arrow")
        self.rows: Lines | ColumnRows = ColumnRows(self.paths, field) if is_columns else Lines(self.paths)
        self.blocks = self.rows.blocks

    def __len__(self) -> int:
        return len(self.rows)

    def where(self, index: int) -> str:
        return self.rows.where(index)

    def close(self) -> None:
        self.rows.close()


class JsonTexts(JsonRecords, TokenizedText):
    """The documents at one key of the records."""

    reads_field = True

    def piece(self, index: int) -> DocumentPiece:
        key = self.source.field
        record = self.rows.record(index)
        if key not in record:
            keys = ", ".join(list(record)[:8])
            raise InvalidRecordError(f"data.field={key} is not a key of the record; expected one of {keys}")
        return DocumentPiece(string_value(record[key], key), True, True)


def read_objects(file: str | Path, contents: str) -> Iterator[tuple[int, JsonDict]]:
    """The objects of a file, each with the number of its line. `contents`: what a line is, for errors."""
    is_empty = True
    number = 0
    try:
        with Path(file).open("rb") as opened:
            while line := opened.readline(MAX_LINE_BYTES):
                number += 1
                if line.strip():
                    is_empty = False
                    yield number, parse_object(line)
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}") from error
    except InvalidRecordError as error:
        raise UserError(f"{file}, line {number}: not a valid {contents}: {error}") from error
    if is_empty:
        raise UserError(f"{file}: the file is empty; write one {contents} per line")


def parse_object(line: bytes) -> JsonDict:
    """The object that a line contains."""
    try:
        record = parse_json(line.removeprefix(BYTE_ORDER_MARK).decode())
    except UnicodeDecodeError as error:
        raise InvalidRecordError(f"invalid JSON: {error}") from error
    if not isinstance(record, dict):
        raise InvalidRecordError(f"must be a JSON object, not {as_yaml(record)[:60]}")
    return record


def parse_json(text: str) -> Any:
    """The value of a text in JSON; an error if a string is not valid Unicode."""
    try:
        value = json.loads(text)
        if SURROGATE.search(text):  # JSON can write half of a surrogate pair, which no text contains
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise InvalidRecordError(f"a string is not valid Unicode: {error}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidRecordError(f"invalid JSON: {error}") from error
    return value


def string_value(value: object, key: str) -> str:
    """`value`, the text at `key` of a line."""
    if not isinstance(value, str):
        raise InvalidRecordError(f"{key} must be a string, not {as_yaml(value)[:60]}")
    return value
