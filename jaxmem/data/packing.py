"""Builds rows of tokens from document streams; each row of the batch has its own stream.

Row r of R reads the records r, r + R, r + 2R, ... of the global order. So the batch of a step is the same for any
number of processes, and each process reads only its own rows. Packed rows of a mixture change places in each round of R
records: the sources alternate with a period, so a row whose places are R apart could read a single source, and rows of
short documents read more documents. The position in the data is two numbers per row: the record, and how many of its
tokens are used. (grain's packing fills rows from one stream, in an order that depends on the number of processes.)

With packing, a row has as many documents as fit, up to `data.documents_per_row`, and the last document is continued in
the next row. If a row reaches this limit, its rest is padding; a run warns about this at its start. The target of a
token is the next token of the same document, even if that token is the first of the next row. A record is a document,
or a piece of a document that is too long for one record. The last token of a record has no target: mask 0. Segment ids
count the documents in a row from 1. Positions begin at 0 with each document and with each row: a document continued in
the next row does not attend to its beginning.

Without packing, a row is the beginning of one record, then padding: segment 0, mask 0.

A document that must not be divided (a conversation, whose answer needs its question) stays in one row: if it does not
fit into the rest of a row, the rest is padding and the next row begins with the document. Tokens that are not targets
have mask 0.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from jaxmem.data.record_order import mix_seed
from jaxmem.data.records import Document
from jaxmem.errors import UserError
from jaxmem.typing import JsonDict

Batch = dict[str, np.ndarray]
Position = JsonDict  # a position in the data, for JSON
MAX_EMPTY = 1000  # this number of consecutive records without tokens is an error, so that reading ends
INT_ARRAYS = ("inputs", "targets", "positions", "segment_ids")


@dataclass(frozen=True)
class OrderedRecords:
    """The records of a split in their order. A place is an index in this order."""

    documents: Callable[[int], Sequence[Document]]
    has: Callable[[int], bool]  # whether the split has a record at this place
    per_record: int = 1  # documents per record; if above 1, each document is one row
    # For DPO: the log-probability of each document of a record under the reference model.
    references: Callable[[int], np.ndarray] | None = None
    release: Callable[[int], None] | None = None  # records before this place are no longer needed

    def document(self, number: int) -> Document:
        """The document of this number, counted through all records."""
        place, index = divmod(number, self.per_record)
        return self.documents(place)[index]

    def reference(self, number: int) -> float:
        """The reference model's log-probability of a document; 0 beyond the last record."""
        assert self.references is not None
        place, index = divmod(number, self.per_record)
        return float(self.references(place)[index]) if self.has(place) else 0.0


def write_document(document: Document, offset: int, row: Batch, index: int, segment: int) -> int:
    """Writes the tokens of a document that fit into a row.

    Args:
        document: the document.
        offset: the first token to write.
        row: arrays [length], written in place.
        index: the position in the row of the first token.
        segment: the segment id of the document in this row.

    Returns:
        The number of tokens that were written.
    """
    left = document.tokens[offset:]
    used = min(len(row["inputs"]) - index, len(left))
    known = min(used, len(left) - 1)  # inputs whose next token belongs to the same record
    if used:
        is_target = document.is_target
        row["inputs"][index : index + used] = left[:used]
        row["targets"][index : index + known] = left[1 : known + 1]
        row["mask"][index : index + known] = 1 if is_target is None else is_target[offset + 1 : offset + known + 1]
        row["positions"][index : index + used] = np.arange(used)
        row["segment_ids"][index : index + used] = segment
    return used


class RowStream:
    """The stream of one row: one document of each round of `stride` documents."""

    finished: int  # documents that are used completely
    offset: int  # tokens of the next document that are used already
    next_document: int  # its number

    def __init__(
        self, records: OrderedRecords, row: int, stride: int, most: int | None, *, is_mixture: bool = False
    ) -> None:
        """`most`: documents per row; None: rows are not packed. `is_mixture`: whether rows change places."""
        self.records = records
        self._row = row
        self._stride = stride
        self._most = most
        self._changes_places = is_mixture and most is not None
        self._empty = 0  # consecutive records with nothing to train on
        self.seek(0, 0)

    def seek(self, finished: int, offset: int) -> None:
        self.finished = finished
        self.offset = offset
        turn = mix_seed(finished) if self._changes_places else 0
        self.next_document = finished * self._stride + (self._row + turn) % self._stride
        self._document: Document | None = None

    @property
    def has_ended(self) -> bool:
        return not self.records.has(self.place)

    @property
    def place(self) -> int:
        """The place of the next record."""
        return self.next_document // self.records.per_record

    def fill(self, row: Batch) -> None:
        """Writes the next row into arrays of zeros; the rest of the row is padding."""
        index = 0
        segment = 0
        length = len(row["inputs"])
        while index < length and not self.has_ended:
            if self._document is None:
                self._document = self.records.document(self.next_document)
            # A run that an earlier version began may be in the middle of another, longer document.
            left = max(0, len(self._document.tokens) - self.offset)
            if self._document.is_indivisible and index and left > length - index:
                return
            if left and segment == self._most:
                return
            segment += left > 0
            self._empty = 0 if left else self._empty + 1
            if self._empty > MAX_EMPTY:
                raise UserError(
                    f"{MAX_EMPTY} consecutive records have no token to train on; "
                    "check the data, data.on_invalid and data.on_overlong"
                )
            used = write_document(self._document, self.offset, row, index, segment)
            index += used
            self.offset += used
            if self._most is None or used == left:
                self.seek(self.finished + 1, 0)
            if self._most is None:
                return


class Rows:
    """The rows of one process, batch by batch: an iterator of (whether any row has data, batch) for grain."""

    step = 0  # batches built
    position: Position

    @property
    def has_ended(self) -> bool:
        raise NotImplementedError

    def batch(self) -> Batch:
        raise NotImplementedError

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[bool, Batch]:
        has_data = not self.has_ended
        batch = self.batch()
        self.step += 1
        return has_data, batch

    def get_state(self) -> JsonDict:
        return {"step": self.step, **self.position}

    def set_state(self, state: JsonDict) -> None:
        self.position = state
        self.step = state["step"]


class TextRows(Rows):
    """Rows of tokens: [micro-batches, rows of this process per micro-batch, length]."""

    def __init__(self, streams: Sequence[RowStream], rows: np.ndarray, length: int) -> None:
        self._streams = streams
        self._rows = rows
        self._length = length

    @property
    def has_ended(self) -> bool:
        return all(stream.has_ended for stream in self._streams)

    def batch(self) -> Batch:
        shape = (*self._rows.shape, self._length)
        batch = {name: np.zeros(shape, np.int32) for name in INT_ARRAYS}  # padding
        batch["mask"] = np.zeros(shape, np.float32)
        reference = {}
        if self._streams[0].records.references is not None:
            values = [stream.records.reference(stream.next_document) for stream in self._streams]
            reference["reference"] = np.array(values, np.float32).reshape(self._rows.shape)
        flat = {name: array.reshape(-1, self._length) for name, array in batch.items()}
        for i, stream in enumerate(self._streams):
            stream.fill({name: array[i] for name, array in flat.items()})
        for records in {stream.records for stream in self._streams}:
            if records.release is not None:
                records.release(min(stream.place for stream in self._streams if stream.records is records))
        return batch | reference

    @property
    def position(self) -> Position:
        """For each row, the number of finished documents and of used tokens of the next document."""
        rows_and_streams = zip(self._rows.ravel().tolist(), self._streams, strict=True)
        return {"rows": [[row, stream.finished, stream.offset] for row, stream in rows_and_streams]}

    @position.setter
    def position(self, position: Position) -> None:
        saved = {row: (finished, offset) for row, finished, offset in position["rows"]}
        rows = self._rows.ravel().tolist()
        if missing := [row for row in rows if row not in saved]:
            raise UserError(
                f"the saved position in the data lacks rows {missing[:8]}, which other processes read; merge"
                " the positions of all processes with data.merge_states"
            )
        for row, stream in zip(rows, self._streams, strict=True):
            stream.seek(*saved[row])
