"""Rows of tokens from streams of documents, each row of the batch walking its own way.

Row r of R reads the records r, r + R, r + 2R, ... of the global order. So the batch of a step is the
same for any number of processes, each reads its own rows only, and a position is two numbers a row:
which record, and how many of its tokens are used.

Packed, a row is filled by as many documents as it takes, the last one continued in the next row. A
target is the next token of the same document, also where that token is the first of the next row; the
last token of a record (its end-of-document token, or the last of a piece) has none: mask 0. Segment
ids count the documents in a row from 1. Positions begin at 0 with each document and with each row: a
document continued in the next row sees nothing of what came before, so its positions begin at 0 again.

Unpacked, a row is the beginning of one record, then padding: segment 0, mask 0.

A record may say that it stays whole (a conversation, which would lose its question): where a row has no room for it,
the row ends in padding and the next one begins with it. Which of its tokens are learnt it may say too; others have
mask 0 as targets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jaxmem.errors import UserError

Batch = dict[str, np.ndarray]
Place = dict[str, Any]  # in the data, for JSON
EMPTY = 1000  # records one after the other, that all were skipped; or data of nothing else would never fill a row
OF_TOKENS = ("inputs", "targets", "positions", "segment_ids")


class Document(NamedTuple):
    """A record's tokens, and what is said of them."""

    tokens: np.ndarray
    learnt: np.ndarray | None = None  # of each token whether it is, as a target; None: all
    whole: bool = False  # it is no longer than a row, and lies in one


def empty_rows(*shape: int) -> Batch:
    """Arrays that are padding everywhere: [..., time]."""
    return {**{name: np.zeros(shape, np.int32) for name in OF_TOKENS}, "mask": np.zeros(shape, np.float32)}


def lay(document: Document, offset: int, at: int, segment: int, row: Batch) -> int:
    """Writes a document, from one of its tokens on, into a row from one of its places on, as far as there is room.
    Returns how many tokens that was."""
    tokens, learnt, _ = document
    left = tokens[offset:]
    used = min(len(row["inputs"]) - at, len(left))
    known = min(used, len(left) - 1)  # inputs whose next token belongs to the same record
    if used:
        row["inputs"][at : at + used] = left[:used]
        row["targets"][at : at + known] = left[1 : known + 1]
        row["mask"][at : at + known] = 1 if learnt is None else learnt[offset + 1 : offset + known + 1]
        row["positions"][at : at + used] = np.arange(used)
        row["segment_ids"][at : at + used] = segment
    return used


class RowStream:
    """One row's walk: the records row, row + stride, ... below `total`."""

    def __init__(self, read: Callable[[int], Document], row: int, stride: int, total: int, packing: bool) -> None:
        self._read, self._row, self._stride, self._total, self._packing = read, row, stride, total, packing
        self._document: Document | None = None
        self.record = 0  # records finished
        self.offset = 0  # tokens used of the one after them

    def seek(self, record: int, offset: int) -> None:
        self.record, self.offset, self._document = record, offset, None

    @property
    def ended(self) -> bool:
        return self._row + self.record * self._stride >= self._total

    def fill(self, row: Batch) -> None:
        """Writes the next row into arrays of zeros; what stays zero is padding."""
        at, segment, length, empty = 0, 0, len(row["inputs"]), 0
        while at < length and not self.ended:
            if self._document is None:
                self._document = self._read(self._row + self.record * self._stride)
            left = len(self._document.tokens) - self.offset
            if self._document.whole and at and left > length - at:
                return
            segment += left > 0
            empty = 0 if left else empty + 1
            if empty > EMPTY:
                raise UserError(f"{EMPTY} records in a row hold nothing to learn (data.on_invalid, data.on_overlong)")
            used = lay(self._document, self.offset, at, segment, row)
            at += used
            self.offset += used
            if not self._packing or used == left:
                self.seek(self.record + 1, 0)
            if not self._packing:
                return


class TextRows:
    """The rows that one process builds: [accumulate, columns, time]."""

    def __init__(
        self, read: Callable[[int], Document], rows: np.ndarray, stride: int, total: int, time: int, packing: bool
    ) -> None:
        self._shape, self._numbers = (*rows.shape, time), rows.ravel().tolist()
        self._streams = [RowStream(read, int(row), stride, total, packing) for row in rows.flat]

    @property
    def ended(self) -> bool:
        return all(stream.ended for stream in self._streams)

    def batch(self) -> Batch:
        batch = empty_rows(*self._shape)
        flat = {name: array.reshape(-1, self._shape[-1]) for name, array in batch.items()}
        for i, stream in enumerate(self._streams):
            stream.fill({name: array[i] for name, array in flat.items()})
        return batch

    @property
    def place(self) -> Place:
        """Of each row how many records are finished, and how many tokens of the next one."""
        found = zip(self._numbers, self._streams, strict=True)
        return {"rows": [[row, stream.record, stream.offset] for row, stream in found]}

    @place.setter
    def place(self, place: Place) -> None:
        saved = {row: (record, offset) for row, record, offset in place["rows"]}
        if lacking := [row for row in self._numbers if row not in saved]:
            raise UserError(f"the saved position in the data lacks rows {lacking[:8]}: not all processes' states")
        for row, stream in zip(self._numbers, self._streams, strict=True):
            stream.seek(*saved[row])
