"""Rows hardly longer than what lies in them: each batch of records of alike length.

All rows of a batch have one length: the shortest of `data.buckets` and `data.sequence_length` that holds each of its
records. Records are gone through in the split's order, and each waits with those of its bucket until they fill a batch,
which is the next one. So a batch has as many rows as ever, what they hold follows from the order alone, and every
record is seen as often as without buckets; a few come later than they would. Where the split ends, what waits makes the
last batches, filled up with padding.

A position is how far the order has been gone through, and which records wait: fewer than a batch of each bucket. All
processes go through the whole order, since all must know which bucket is next: each reads every record, and keeps those
of its own rows. A token cache tells lengths without reading; elsewhere P processes tokenize everything P times, which
with the cores of P hosts takes the time of once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from jaxmem.data.packing import Batch, Document, Place, empty_rows, lay

Documents = Sequence[Document]  # of one record: each fills a row


class BucketRows:
    """The rows that one process builds: [accumulate, columns, time of the batch's bucket]."""

    def __init__(
        self,
        read: Callable[[int], Documents],
        length: Callable[[int], int | None],
        rows: np.ndarray,
        stride: int,
        total: int,
        lengths: Sequence[int],
        each: int = 1,
        references: Callable[[int], np.ndarray] | None = None,
    ) -> None:
        """`read`, `length` (None: only reading tells) and `references` (one for each document) of a place in the order
        of `total` records, of which each has `each` documents; `lengths` of the buckets, from the shortest on."""
        self._read, self._length, self._references = read, length, references
        self._rows, self._records, self._total, self._each = rows, stride // each, total, each
        self._lengths = np.asarray(lengths)
        self._own = set((rows.ravel() // each).tolist())  # records of a batch that this process has rows of
        self._next = 0
        self._waiting: list[list[int]] = [[] for _ in lengths]
        self._kept: dict[int, Documents] = {}  # of what waits, those of own rows

    @property
    def ended(self) -> bool:
        return self._next >= self._total and not any(self._waiting)

    def batch(self) -> Batch:
        bucket = self._filled()
        places, self._waiting[bucket] = self._waiting[bucket], []
        batch = empty_rows(*self._rows.shape, int(self._lengths[bucket]))
        if self._references is not None:
            batch["reference"] = np.zeros(self._rows.shape, np.float32)
        for index, row in np.ndenumerate(self._rows):
            record, answer = divmod(int(row), self._each)
            if record < len(places):
                place = places[record]
                lay(self._documents(place)[answer], 0, 0, 1, {name: array[index] for name, array in batch.items()})
                if self._references is not None:
                    batch["reference"][index] = self._references(place)[answer]
        for place in places:
            self._kept.pop(place, None)
        return batch

    def _filled(self) -> int:
        """The bucket whose batch is the next one."""
        while self._next < self._total:
            place = self._next
            bucket = self._bucket(place)
            self._next += 1
            self._waiting[bucket].append(place)
            if len(self._waiting[bucket]) == self._records:
                return bucket
        return next((bucket for bucket, places in enumerate(self._waiting) if places), 0)

    def _bucket(self, place: int) -> int:
        length, documents = self._length(place), None
        if length is None:
            documents = self._read(place)
            length = max(len(document.tokens) for document in documents)
        # What is longer than the longest is cut there, as without buckets.
        bucket = min(int(np.searchsorted(self._lengths, length)), len(self._lengths) - 1)
        if documents is not None and len(self._waiting[bucket]) in self._own:
            self._kept[place] = documents
        return bucket

    def _documents(self, place: int) -> Documents:
        if place not in self._kept:
            self._kept[place] = self._read(place)
        return self._kept[place]

    @property
    def place(self) -> Place:
        """The same on all processes."""
        return {"next": self._next, "waiting": [list(places) for places in self._waiting]}

    @place.setter
    def place(self, place: Place) -> None:
        self._next, self._waiting = place["next"], [list(places) for places in place["waiting"]]
        self._kept.clear()
