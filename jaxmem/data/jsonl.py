"""Documents that are lines of JSON: `{"text": "..."}`, one document per line.

One pass over the files at the speed of the disk finds the lines; nothing is parsed until it is read. The index holds
the offset of one line per 16 KiB of file, and the lines that are empty or too long for one record: 10 GB need about
10 MB of memory whatever the length of the lines. Reading a record reads the 16 KiB around it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxmem.config.sections import Data, Source
from jaxmem.data import long_line
from jaxmem.data.files import OpenFiles, file_size
from jaxmem.data.records import DocumentPiece, InvalidRecordError, TokenizedText, no_documents, piece_bytes
from jaxmem.data.tokenizer import Tokenizer
from jaxmem.errors import UserError

BLOCK = 16 * 1024
CHUNK = 1 << 20
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def open_source(paths: Sequence[Path], source: Source, data: Data, tokenizer: Tokenizer) -> TokenizedText:
    limit = piece_bytes(data.sequence_length)
    return TokenizedText(JsonLines(paths, source.field, limit, skip=data.on_invalid == "skip"), data, tokenizer)


class JsonLines:
    """The documents of JSONL files; a line longer than `limit` bytes gives several records."""

    blocks: np.ndarray | None = None

    def __init__(self, paths: Sequence[Path], field: str | None, limit: int, *, skip: bool = False) -> None:
        """`field` None: `line` gives whole lines, none longer than `limit`. `skip`: an invalid long line is an
        error when it is read, not before."""
        self.field = field or ""
        self._files = OpenFiles()
        self._indexes = [_LineIndex(path, self._files, field, limit, skip) for path in paths]
        self._ends = np.cumsum([index.records for index in self._indexes], dtype=np.int64)
        if not self._ends[-1]:
            raise no_documents(paths)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def _find(self, index: int) -> tuple[_LineIndex, int]:
        file = int(np.searchsorted(self._ends, index, side="right"))
        return self._indexes[file], index - int(self._ends[file]) + self._indexes[file].records

    def __getitem__(self, index: int) -> DocumentPiece:
        file, record = self._find(index)
        cuts, piece = file.cuts(record)
        if cuts is None:
            found = parse_object(file.line(record))
            if self.field not in found:
                raise InvalidRecordError(long_line.missing_field(self.field, list(found)))
            return DocumentPiece(string_value(found[self.field], self.field).encode(), True, True)
        contents = self._files.read(file.path, int(cuts[piece]), int(cuts[piece + 1]))
        text = string_value(long_line.decode(contents), self.field)
        return DocumentPiece(text.encode(), piece == 0, piece == len(cuts) - 2)

    def line(self, index: int) -> bytes:
        file, record = self._find(index)
        return file.line(record)

    def where(self, index: int) -> str:
        file, record = self._find(index)
        return f"{file.path}, line {file.line_number(record)[0] + 1}"

    def close(self) -> None:
        self._files.close()


def parse_object(line: bytes) -> dict[str, Any]:
    """The object that a line contains."""
    try:
        found = json.loads(line.removeprefix(BYTE_ORDER_MARK).decode())
    except (ValueError, RecursionError) as error:
        raise InvalidRecordError(f"invalid JSON: {error}") from error
    if not isinstance(found, dict):
        raise InvalidRecordError(f"expected an object, found {type(found).__name__}")
    return found


def string_value(value: Any, key: str) -> str:
    """`value`, the text at `key` of a line."""
    if not isinstance(value, str):
        raise InvalidRecordError(f"{key!r} is not a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair, which JSON can write but no text contains
        raise InvalidRecordError(f"{key!r} is not valid text: {error}") from error
    return value


class _LineIndex:
    """Where the lines of one file begin and end."""

    def __init__(self, path: Path, files: OpenFiles, field: str | None, limit: int, skip: bool) -> None:
        self.path, self.limit = path, limit
        self._files = files
        self._size = file_size(path)
        self._long: dict[int, np.ndarray] = {}  # line -> cuts of its document
        marks, special, lines = self._scan()
        self._mark_lines, self._mark_offsets = marks
        special_lines, starts, lengths = special
        counts = (lengths > limit).astype(np.int64)  # records of each line that is not one plain record
        for i in np.flatnonzero(counts):
            try:
                cuts = self._cut(int(special_lines[i]), int(starts[i]), int(starts[i] + lengths[i]), field)
            except InvalidRecordError as error:
                if skip:
                    continue  # one record, which does not parse
                raise UserError(f"{path}, line {int(special_lines[i]) + 1}: {error}") from error
            self._long[int(special_lines[i])] = cuts
            counts[i] = len(cuts) - 1
        extra = np.cumsum(counts - 1)
        self._special_lines, self._special_counts = special_lines, counts
        self._special_records = special_lines + extra - (counts - 1)  # the first record of each
        self.records = lines + (int(extra[-1]) if len(extra) else 0)

    def _cut(self, line: int, start: int, end: int, field: str | None) -> np.ndarray:
        if field is None:
            raise UserError(
                f"{self.path}, line {line + 1}: {end - start:,} bytes; at most {self.limit:,} are supported"
            )

        def read(low: int, high: int) -> bytes:
            return self._files.read(self.path, low, high)

        if start == 0 and read(0, 3) == BYTE_ORDER_MARK:
            start = 3
        return long_line.cut_string(read, *long_line.find_string(read, start, end, field), self.limit)

    def _scan(self) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray, np.ndarray], int]:
        """Marks (line, offset), lines that are empty or long (line, start, length), count of lines."""
        marks: list[np.ndarray] = []
        special: list[np.ndarray] = []
        lines = line_start = 0
        block, last_byte = -1, 0
        for base in range(0, self._size, CHUNK):
            chunk = np.frombuffer(self._files.read(self.path, base, min(base + CHUNK, self._size)), np.uint8)
            ends = np.flatnonzero(chunk == ord("\n"))
            before = np.where(ends > 0, chunk[ends - 1], last_byte)  # the byte in front of the line's end
            last_byte = int(chunk[-1])
            ends += base
            if base + len(chunk) == self._size and last_byte != ord("\n"):  # the last line has no end
                ends, before = np.append(ends, self._size), np.append(before, 0)
            if not len(ends):
                continue
            starts = np.concatenate(([line_start], ends[:-1] + 1))
            lengths = ends - starts
            numbers = np.arange(lines, lines + len(ends))
            blocks = starts // BLOCK
            new = np.diff(blocks, prepend=block) > 0
            marks.append(np.stack((numbers[new], starts[new])))
            odd = (lengths == 0) | ((lengths == 1) & (before == ord("\r"))) | (lengths > self.limit)
            special.append(np.stack((numbers[odd], starts[odd], lengths[odd])))
            lines, line_start, block = lines + len(ends), int(ends[-1]) + 1, int(blocks[-1])
        none = np.zeros((3, 0), np.int64)
        mark_lines, mark_offsets = np.concatenate([none[:2], *marks], axis=1)
        numbers, starts, lengths = np.concatenate([none, *special], axis=1)
        return (mark_lines, mark_offsets), (numbers, starts, lengths), lines

    def line_number(self, record: int) -> tuple[int, int]:
        """The line that holds a record, from 0, and which record of that line it is."""
        i = int(np.searchsorted(self._special_records, record, side="right")) - 1
        if i < 0:
            return record, 0
        line, within = int(self._special_lines[i]), record - int(self._special_records[i])
        count = int(self._special_counts[i])
        return (line, within) if within < count else (line + 1 + within - count, 0)

    def cuts(self, record: int) -> tuple[np.ndarray | None, int]:
        """The cuts of the long line that a record is part of, if it is, and which part."""
        line, piece = self.line_number(record)
        return self._long.get(line), piece

    def line(self, record: int) -> bytes:
        number, _ = self.line_number(record)
        mark = int(np.searchsorted(self._mark_lines, number, side="right")) - 1
        start = int(self._mark_offsets[mark])
        # The line starts within BLOCK of the mark and is no longer than the limit.
        end = min(start + BLOCK + self.limit + 1, self._size)
        if mark + 1 < len(self._mark_offsets):
            end = min(end, int(self._mark_offsets[mark + 1]))
        data = self._files.read(self.path, start, end)
        return data.split(b"\n", number - int(self._mark_lines[mark]) + 1)[number - int(self._mark_lines[mark])]
