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
from typing import NamedTuple

import numpy as np

Batch = dict[str, np.ndarray]


class Document(NamedTuple):
    """A record's tokens, and what is said of them."""

    tokens: np.ndarray
    learnt: np.ndarray | None = None  # of each token whether it is, as a target; None: all
    whole: bool = False  # it is no longer than a row, and lies in one


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

    def fill(
        self, inputs: np.ndarray, targets: np.ndarray, positions: np.ndarray, segments: np.ndarray, mask: np.ndarray
    ) -> None:
        """Writes the next row into arrays of zeros; what stays zero is padding."""
        at, segment, length = 0, 0, len(inputs)
        while at < length and not self.ended:
            if self._document is None:
                self._document = self._read(self._row + self.record * self._stride)
            tokens, learnt, whole = self._document
            left = tokens[self.offset :]
            if whole and at and len(left) > length - at:
                return
            used = min(length - at, len(left))
            known = min(used, len(left) - 1)  # inputs whose next token belongs to the same record
            if used:
                segment += 1
                inputs[at : at + used] = left[:used]
                targets[at : at + known] = left[1 : known + 1]
                mask[at : at + known] = 1 if learnt is None else learnt[self.offset + 1 : self.offset + known + 1]
                positions[at : at + used] = np.arange(used)
                segments[at : at + used] = segment
            at += used
            self.offset += used
            if not self._packing or used == len(left):
                self.seek(self.record + 1, 0)
            if not self._packing:
                return


class TextRows:
    """The rows that one process builds: [accumulate, columns, time]."""

    def __init__(
        self, read: Callable[[int], Document], rows: np.ndarray, stride: int, total: int, time: int, packing: bool
    ) -> None:
        self._shape = (*rows.shape, time)
        self._streams = [RowStream(read, int(row), stride, total, packing) for row in rows.flat]

    @property
    def ended(self) -> bool:
        return all(stream.ended for stream in self._streams)

    def batch(self) -> Batch:
        batch = {name: np.zeros(self._shape, np.int32) for name in ("inputs", "targets", "positions", "segment_ids")}
        batch["mask"] = np.zeros(self._shape, np.float32)
        flat = [array.reshape(-1, self._shape[-1]) for array in batch.values()]
        for i, stream in enumerate(self._streams):
            stream.fill(*(array[i] for array in flat))
        return batch

    @property
    def positions(self) -> np.ndarray:
        return np.array([(stream.record, stream.offset) for stream in self._streams], np.int64)

    @positions.setter
    def positions(self, values: np.ndarray) -> None:
        for stream, (record, offset) in zip(self._streams, values.tolist(), strict=True):
            stream.seek(record, offset)
