"""Batches of records of similar length, with little padding.

All rows of a batch have one length: the shortest of `data.buckets` and `data.sequence_length` that fits each of its
records. Records are read in the split's order, and each waits with the other records of its bucket until they fill the
next batch. So a batch has as many rows as without buckets, its contents follow from the order alone, and every record
is used equally often; some are used a few batches later. When the split ends, the waiting records form the last
batches, which are padded.

A position consists of the number of records read and the records that wait: fewer than a batch for each bucket. All
processes go through the complete order, since all must know which bucket is next: each reads every record, and keeps
the records of its own rows. A token cache stores lengths; otherwise P processes tokenize everything P times, which
takes no longer with the cores of P hosts.
"""

from collections.abc import Sequence
from itertools import chain

import numpy as np

from jaxmem.data.packing import Batch, OrderedRecords, Position, Rows, empty_rows, write_document
from jaxmem.data.records import Document


class BucketRows(Rows):
    """Rows of tokens: [accumulate, columns, length of the batch's bucket]."""

    def __init__(self, records: OrderedRecords, rows: np.ndarray, stride: int, lengths: Sequence[int]) -> None:
        """`lengths`: the lengths of the buckets, in ascending order."""
        self._records = records
        self._rows = rows
        self._lengths = np.asarray(lengths)
        self._batch_records = stride // records.per_record
        records_of_rows = rows.ravel() // records.per_record
        self._of_process = set(records_of_rows.tolist())  # records of a batch in this process's rows
        self._next = 0
        self._waiting: list[list[int]] = [[] for _ in lengths]
        self._documents: dict[int, Sequence[Document]] = {}  # waiting records in this process's rows

    @property
    def has_ended(self) -> bool:
        return not self._records.has(self._next) and not any(self._waiting)

    def batch(self) -> Batch:
        bucket = self._fill()
        places = self._waiting[bucket]
        self._waiting[bucket] = []
        batch = empty_rows(*self._rows.shape, int(self._lengths[bucket]))
        reference = np.zeros(self._rows.shape, np.float32)
        for index, row in np.ndenumerate(self._rows):
            record, answer = divmod(int(row), self._records.per_record)
            if record < len(places):
                place = places[record]
                documents = self._documents.get(place) or self._records.documents(place)
                write_document(documents[answer], 0, {name: array[index] for name, array in batch.items()}, 0, 1)
                if self._records.references is not None:
                    reference[index] = self._records.references(place)[answer]
        for place in places:
            self._documents.pop(place, None)
        if self._records.release is not None:
            self._records.release(min([self._next, *chain(*self._waiting)]))
        return batch if self._records.references is None else batch | {"reference": reference}

    def _fill(self) -> int:
        """Reads records until a bucket has enough for a batch; returns that bucket."""
        while self._records.has(self._next):
            bucket = self._bucket(self._next)
            self._waiting[bucket].append(self._next)
            self._next += 1
            if len(self._waiting[bucket]) == self._batch_records:
                return bucket
        return next((bucket for bucket, places in enumerate(self._waiting) if places), 0)

    def _bucket(self, place: int) -> int:
        length = self._records.length(place)
        documents = None
        if length is None:
            documents = self._records.documents(place)
            length = max(len(document.tokens) for document in documents)
        # A record longer than the longest bucket is cut, as without buckets.
        bucket = min(int(np.searchsorted(self._lengths, length)), len(self._lengths) - 1)
        if documents is not None and len(self._waiting[bucket]) in self._of_process:
            self._documents[place] = documents
        return bucket

    @property
    def position(self) -> Position:
        """The position, which is equal on all processes."""
        return {"next": self._next, "waiting": [list(places) for places in self._waiting]}

    @position.setter
    def position(self, position: Position) -> None:
        self._next = position["next"]
        self._waiting = [list(places) for places in position["waiting"]]
        self._documents.clear()
