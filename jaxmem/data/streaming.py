"""Sources that are read file by file while a run trains, with `data.streaming`.

Each epoch reads the files in another random order, and the records of a file in random order. The next file is fetched
in the background. A file of the hub that was not in the cache is deleted when all rows have read it, so the disk
contains two or three files at a time.

If there are at least as many files as processes with different rows, each process reads its own files (a shard);
otherwise all processes read all files. The number of shards is part of the position, so a run that resumes with another
number of processes reads the same records.

The number of records of a file is known when the file has been read. The position contains these numbers, so a run that
resumes opens only the files that it reads next. Evaluation reads the held-out share of the first file.
"""

import math
import threading
from bisect import bisect_right
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

import numpy as np

from jaxmem.config.hub import DatasetFiles
from jaxmem.config.sections import Data, Source
from jaxmem.data.record_order import (
    RecordOrder,
    WeightedSelection,
    mix_seed,
    permutation,
    training_order,
)
from jaxmem.data.records import Document, EmptyDataError, RecordSource
from jaxmem.data.tokenizer import Tokenizer

FileRecord = tuple[int, int]  # file, record of it
Files = DatasetFiles | list[Path]


class StreamedFiles(RecordSource):
    """The files of a source, each opened by `reader` when it is needed. A record is (file, record of the file)."""

    def __init__(
        self, reader: type[RecordSource], files: Files, source: Source, data: Data, tokenizer: Tokenizer
    ) -> None:
        self.noun = reader.noun
        super().__init__([], source, data, tokenizer)
        self.documents_per_record = reader.documents_per_record
        self._reader = reader
        self._files = files
        self.names = list(map(str, files.names if isinstance(files, DatasetFiles) else files))
        self.first = 0  # the file that is read first
        self.lengths: dict[int, int] = {}  # training records of each file that has been read
        self.used: dict[tuple[int, int], set[int]] = {}  # the files that each shard still needs
        self.held_out: set[int] = set()  # the files that evaluation needs
        self._opened: dict[int, RecordSource | None] = {}  # None: the file has no records
        self._orders: dict[int, RecordOrder] = {}
        self._fetched: dict[int, Future[Path]] = {}
        self._lock = threading.RLock()
        self._fetcher = ThreadPoolExecutor(1, "fetch")
        self._directory = files.new_directory() if isinstance(files, DatasetFiles) else None

    def documents(self, index: FileRecord) -> Sequence[Document]:  # type: ignore[override]
        file, record = index
        opened = self.open(file)
        assert opened is not None
        return opened.documents(record)

    def head(self, count: int) -> list[FileRecord]:
        opened = self.open(self.first)
        return [(self.first, record) for record in opened.head(count)] if opened else []

    def fetch(self, file: int) -> None:
        """Starts to fetch a file, unless it is here."""
        with self._lock:
            if file not in self._fetched:
                self._fetched[file] = self._fetcher.submit(self._path, file)

    def _path(self, file: int) -> Path:
        if self._directory is None or not isinstance(self._files, DatasetFiles):
            return Path(self.names[file])
        return self._files.fetch(self.names[file], self._directory.name)

    def open(self, file: int) -> RecordSource | None:
        """The records of a file; None if it is empty."""
        with self._lock:
            if file not in self._opened:
                self.fetch(file)
                try:
                    opened = self._reader([self._fetched[file].result()], self.source, self.data, self.tokenizer)
                    opened.counts = self.counts
                    self._opened[file] = opened
                except EmptyDataError:
                    self._opened[file] = None
            return self._opened[file]

    def training_order(self, file: int, seed: int) -> RecordOrder | Sequence[FileRecord]:
        """The training records of a file in their order; empty if the file has none. `seed`: of all files."""
        with self._lock:
            opened = self.open(file)
            if opened is not None and file not in self._orders:
                held_out = self.data.held_out if file == 0 else 0.0
                seed = mix_seed(seed, file)
                self._orders[file] = training_order(
                    [len(opened)], [1.0], [opened.blocks], held_out=held_out, seed=seed, shuffle=self.data.shuffle
                )
            return self._orders.get(file, ())

    def keep(self, shard: tuple[int, int], files: set[int]) -> None:
        """Sets the files that a shard still needs; closes all other files."""
        with self._lock:
            self.used[shard] = files
            needed = self.held_out.union(*self.used.values())
            for file in self._fetched.keys() - needed:
                self._close(file)

    def _close(self, file: int) -> None:
        self._orders.pop(file, None)
        if (opened := self._opened.pop(file, None)) is not None:
            opened.close()
        fetched = self._fetched.pop(file)
        if self._directory is None or fetched.cancel() or fetched.exception():
            return
        if (path := fetched.result()).is_relative_to(self._directory.name):
            path.unlink(missing_ok=True)

    def close(self) -> None:
        self._fetcher.shutdown(cancel_futures=True)
        for opened in self._opened.values():
            if opened is not None:
                opened.close()
        if self._directory is not None:
            self._directory.cleanup()


class FileOrder:
    """The training records of a shard of a source, file by file: `find(place)` is (file, record), None after the last
    epoch. Shard i of n reads the files i, i + n, ... of each epoch's order."""

    def __init__(self, files: StreamedFiles, shard: tuple[int, int], seed: int, epochs: int | None) -> None:
        self._files = files
        self._shard = shard
        self._seed = seed
        self._per_epoch = len(range(shard[0], len(files.names), shard[1]))
        self._visits = math.inf if epochs is None else epochs * self._per_epoch
        self._starts = [0]  # the place of the first record of each visit to a file
        self._newest = -1  # the newest visit that is read
        self._files_of = lru_cache(2)(self._files_of_epoch)  # of two epochs where they meet
        files.first = self._file(0)

    def _file(self, visit: int) -> int:
        epoch, turn = divmod(visit, self._per_epoch)
        return int(self._files_of(epoch)[self._shard[0] + turn * self._shard[1]])

    def _files_of_epoch(self, epoch: int) -> Sequence[int] | np.ndarray:
        """The files of all shards in their order."""
        count = len(self._files.names)
        return permutation(count, mix_seed(self._seed, epoch)) if self._files.data.shuffle else range(count)

    def _visit(self, place: int) -> int:
        return bisect_right(self._starts, place) - 1

    def find(self, place: int) -> FileRecord | None:
        while self._starts[-1] <= place:
            visit = len(self._starts) - 1
            if visit >= self._visits:
                return None
            if visit >= self._per_epoch and not self._starts[-1] and not self._has_other_files:
                empty = dict.fromkeys(map(self._file, range(visit)))
                raise EmptyDataError([self._files.names[file] for file in empty])
            self._starts.append(self._starts[-1] + self._length(visit))
        visit = self._visit(place)
        if visit > self._newest:
            self._newest = visit
            if visit + 1 < self._visits:
                self._files.fetch(self._file(visit + 1))
        file = self._file(visit)
        order = self._files.training_order(file, self._seed)
        _, record = order[visit // self._per_epoch * len(order) + place - self._starts[visit]]
        return file, record

    @property
    def _has_other_files(self) -> bool:
        """Whether a later epoch of this shard may have records although the first has none."""
        lengths = self._files.lengths
        return self._files.data.shuffle and (len(lengths) < len(self._files.names) or any(lengths.values()))

    def _length(self, visit: int) -> int:
        file = self._file(visit)
        if file not in self._files.lengths:
            self._files.lengths[file] = len(self._files.training_order(file, self._seed))
        return self._files.lengths[file]

    def release(self, place: int) -> None:
        """Closes the files of records before `place`."""
        visits = range(self._visit(place), max(self._newest, 0) + 2)
        self._files.keep(self._shard, {self._file(visit) for visit in visits})


class StreamOrder:
    """The training records of a shard of all sources: `find(place)` is (source, (file, record))."""

    def __init__(self, sources: Sequence[StreamedFiles], shard: tuple[int, int], seed: int, epochs: int | None) -> None:
        self._orders = [FileOrder(files, shard, mix_seed(seed, source), epochs) for source, files in enumerate(sources)]
        self._selection = WeightedSelection([files.source.weight for files in sources])

    def find(self, place: int) -> tuple[int, FileRecord] | None:
        source, place_in_source = self._selection[place]
        location = self._orders[source].find(place_in_source)
        return None if location is None else (source, location)

    def release(self, place: int) -> None:
        """Closes the files of records before `place`."""
        for order, place_in_source in zip(self._orders, self._selection.counts(place), strict=True):
            order.release(place_in_source)


class FirstFilesOrder(RecordOrder):
    """An order of the records of the first file of each source."""

    def __getitem__(self, place: int) -> tuple[int, FileRecord]:
        source, record = super().__getitem__(place)
        return source, (0, record)


def held_out_records(sources: Sequence[StreamedFiles], held_out: float) -> RecordOrder:
    """The held-out records of the first file of each source."""
    opened = []
    for files in sources:
        files.held_out.add(0)
        first = files.open(0)
        if first is None:
            raise EmptyDataError(files.names)
        opened.append(len(first))
    return FirstFilesOrder.of_held_out(opened, [files.source.weight for files in sources], held_out)
