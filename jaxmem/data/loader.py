"""Batches for training and evaluation: the inputs of a step, and the position in the data.

The rows of the global batch are numbered row-major over [accumulate, B], B = global_size / accumulate: row a * B + b. A
process passes its columns b (by default all) and gets arrays [accumulate, its columns, ...]. The contents of a row
depend only on its number (see `packing`), not on the number of processes; with `data.streaming`, also on the
number of processes at the start of the run (`streaming`).

If a split ends (held-out data; training with `data.epochs`), rows end at different steps: a row that has ended is
padding (mask 0) until all rows have ended, so that each record is seen exactly as often as requested. Then iteration
stops. A process with some of the rows does not know when the other rows end: it calls `agree`.

Batches are built ahead in a thread of grain; `state` is the position after the last batch that was returned.
"""

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Self, TypeVar

import numpy as np

from jaxmem.config.sections import Config
from jaxmem.data.corpus import Corpus, Split
from jaxmem.data.packing import Batch, OrderedRecords, Position, Rows, RowStream, TextRows
from jaxmem.data.record_order import RecordOrder
from jaxmem.data.records import Document
from jaxmem.distributed.agree import gather_objects
from jaxmem.errors import UserError

if TYPE_CHECKING:
    from grain import DatasetIterator

BUILT_AHEAD = 2  # batches, in addition to the one being built

Value = TypeVar("Value", int, tuple[int, int])
RowNumber = TypeVar("RowNumber", int, np.ndarray)


@dataclass(frozen=True)
class Shards:
    """How the columns of a batch are divided among shards of the files: equally, in their order."""

    count: int
    width: int  # columns of all shards together

    @property
    def columns(self) -> int:
        """The columns of a shard."""
        return self.width // self.count

    def shard_of(self, row: RowNumber) -> RowNumber:
        """The shard that a row of the batch reads from, or those of an array of rows."""
        return row % self.width // self.columns

    def row_in_shard(self, row: int) -> int:
        """The number of a row among the rows of its shard, row-major over [accumulate, columns]."""
        micro_batch, column = divmod(row, self.width)
        return micro_batch * self.columns + column % self.columns


class Loader(AbstractContextManager["Loader"]):
    """Iterates over the batches of a split, from the beginning or from a restored state.

    `corpus`: the corpus of another loader, to share its index of the files. `agree`: called once per batch if the
    split ends, with whether this process has data left; returns whether any process has data left.
    """

    def __init__(
        self,
        cfg: Config,
        split: Split = "train",
        rows: Sequence[int] | None = None,
        *,
        corpus: Corpus | None = None,
        agree: Callable[[bool], bool] | None = None,
    ) -> None:
        self._owns_corpus = corpus is None
        self.corpus = corpus or Corpus(cfg)
        self._agree = agree
        self._columns = cfg.batch.global_size // cfg.batch.accumulate
        rows = range(self._columns) if rows is None else rows
        if not rows or min(rows) < 0 or max(rows) >= self._columns:
            raise ValueError(f"rows {rows}: expected some of the {self._columns} columns of the batch")
        self._cfg = cfg
        self._rows = np.asarray(rows)
        self._split = split
        self._shards = self._choose_shards()
        self._ends = split != "train" or cfg.data.epochs is not None
        self._begin()
        self._start = self._batches.get_state()

    def _choose_shards(self) -> Shards | None:
        """The shards of the files; None without streaming. Each process has its own shard if its rows are its own, and
        there are at least as many files as processes. Rows that are the same in several processes have the same
        tokens, so all processes choose together."""
        if self._split != "train" or not self._cfg.data.streaming:
            return None
        count = len(self._rows)
        first = int(self._rows[0])
        is_consecutive = np.array_equal(self._rows, np.arange(first, first + count))
        is_share = self._columns % count == 0 and first % count == 0 and is_consecutive
        files = min(len(stream.names) for stream in self.corpus.sources)
        has_own_shard = is_share and self._columns // count <= files
        counts = set(gather_objects(self._columns // count if has_own_shard else 1))
        return Shards(counts.pop() if len(counts) == 1 else 1, self._columns)

    def _begin(self) -> None:
        """Builds batches in a thread, from the beginning."""
        from grain.experimental import ThreadPrefetchDatasetIterator

        # Pairs of (whether any row has data, batch).
        self._batches: DatasetIterator[tuple[bool, Batch]] = ThreadPrefetchDatasetIterator(self._build(), BUILT_AHEAD)
        self._stop = weakref.finalize(self, self._batches.close)  # grain's destructor would fail while Python exits

    def _build(self) -> Rows:
        """The batches of this process, from the beginning."""
        data = self._cfg.data
        micro_batches = np.arange(self._cfg.batch.accumulate)[:, None]
        rows = micro_batches * self._columns + self._rows  # [accumulate, rows of this process]
        if not self._cfg.reads_text:
            from jaxmem.data.images import ImageRows

            [images] = self.corpus.sources
            order = self.corpus.order(self._split)
            return ImageRows(self._cfg, images, order, rows, self._records_to_read(order))
        for stream in self.corpus.sources if self._shards else ():
            stream.used.clear()
        shards = self._shards or Shards(1, self._columns)
        records = {shard: self._records(shard, shards.count) for shard in np.unique(shards.shard_of(rows)).tolist()}
        stride = self._cfg.batch.global_size // shards.count
        most = data.documents_per_row if data.packing else None
        is_mixture = len(self.corpus.sources) > 1
        streams = [
            RowStream(records[shards.shard_of(row)], shards.row_in_shard(row), stride, most, is_mixture=is_mixture)
            for row in rows.ravel().tolist()
        ]
        return TextRows(streams, rows, data.sequence_length)

    def _records(self, shard: int, count: int) -> OrderedRecords:
        """The records of one of `count` shards of the files."""
        cfg = self._cfg
        corpus = self.corpus
        if self._shards is not None:
            return _streamed(corpus, (shard, count), cfg.seed, cfg.data.epochs)
        order = corpus.order(self._split)
        total = self._records_to_read(order)
        return OrderedRecords(
            documents=lambda place: corpus.documents(*order[place]),
            has=lambda place: place < total,
            per_record=corpus.sources[0].documents_per_record,
            references=(lambda place: corpus.reference(order[place][1])) if cfg.objective.name == "dpo" else None,
        )

    def _records_to_read(self, order: RecordOrder) -> int:
        """The number of records until the split ends."""
        is_train = self._split == "train"
        epochs = self._cfg.data.epochs if is_train else 1
        total = order.records(epochs) if epochs is not None else sys.maxsize
        size = self._cfg.batch.global_size
        if is_train and total * self.corpus.sources[0].documents_per_record < size:
            raise UserError(
                f"data.epochs={epochs} of {len(order)} records is less than one batch of batch.global_size="
                f"{size}; decrease batch.global_size or increase data.epochs"
            )
        return total

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        position = self._batches.get_state()
        has_data, batch = next(self._batches)
        if self._ends and not (self._agree(has_data) if self._agree else has_data):
            self._batches.set_state(position)
            raise StopIteration
        return batch

    def state(self) -> Position:
        """The position after the last batch that was returned, for JSON: the rows of this process as [row, record,
        token]."""
        position = self._batches.get_state()
        state = {"step": position["step"], "global_size": self._cfg.batch.global_size} | position
        if self._shards:
            state["shards"] = list(astuple(self._shards))
            state["files"] = [
                [source, file, length]
                for source, stream in enumerate(self.corpus.sources)
                for file, length in list(stream.lengths.items())  # a copy: the thread that builds batches adds files
            ]
        return state

    def restore(self, state: Position) -> None:
        """Continues at a position that `state` or `merge_states` returned, for any number of processes."""
        if state["global_size"] != self._cfg.batch.global_size:
            raise UserError(
                f"batch.global_size={self._cfg.batch.global_size} differs from that of the checkpoint; "
                f"use batch.global_size={state['global_size']}"
            )
        for source, file, length in state.get("files", ()):
            self.corpus.sources[source].lengths[file] = length
        shards = Shards(*state["shards"]) if "shards" in state else None
        if shards != self._shards:
            self._shards = shards
            self._stop()
            self._begin()
        self._batches.set_state(state)

    def has_ended(self) -> bool:
        """Whether no batch is left. All processes call it together."""
        rows = self._build()
        rows.set_state(self._batches.get_state())
        has_data = not rows.has_ended
        return not (self._agree(has_data) if self._agree else has_data)

    def rewind(self) -> None:
        """Returns to the beginning of the split."""
        self._batches.set_state(self._start)

    def close(self) -> None:
        """Stops the thread; closes the files unless the corpus is shared."""
        self._stop()
        if self._owns_corpus:
            self.corpus.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def _streamed(corpus: Corpus, shard: tuple[int, int], seed: int, epochs: int | None) -> OrderedRecords:
    """The records of a shard of the files."""
    from jaxmem.data.streaming import StreamOrder

    order = StreamOrder(corpus.sources, shard, seed, epochs)

    def documents(place: int) -> Sequence[Document]:
        location = order.find(place)
        assert location is not None
        return corpus.documents(*location)

    return OrderedRecords(
        documents,
        has=lambda place: epochs is None or order.find(place) is not None,
        release=order.release,
    )


def merge_states(states: Iterable[Position]) -> Position:
    """One position from the positions of all processes, to be saved. Processes with the same row must agree on it.

    >>> one = {"step": 3, "global_size": 2, "rows": [[0, 5, 17]]}
    >>> merge_states([one, {"step": 3, "global_size": 2, "rows": [[1, 4, 2]]}])
    {'step': 3, 'global_size': 2, 'rows': [[0, 5, 17], [1, 4, 2]]}
    """
    states = list(states)
    if "own" in states[0]:  # of a script's batches
        count = _common((state["own"] for state in states), "batches")
        return {"own": count, "iterators": tuple(state["iterator"] for state in states)}
    step, size = _common(((state["step"], state["global_size"]) for state in states), "(step, global_size)")
    merged = {"step": step, "global_size": size, "rows": _merged_rows(states, size)}
    if "files" in states[0]:  # each process knows the lengths of the files that it has read
        files = sorted({tuple(file) for state in states for file in state["files"]})
        shards = _common((tuple(state["shards"]) for state in states), "(shards, columns)")
        merged |= {"shards": list(shards), "files": [list(file) for file in files]}
    return merged


def _merged_rows(states: Sequence[Position], size: int) -> list[list[int]]:
    """The positions of all `size` rows of the batch."""
    rows: dict[int, list[int]] = {}
    for state in states:
        for row in state["rows"]:
            if rows.setdefault(row[0], list(row)) != list(row):
                raise ValueError(
                    f"processes are at different positions in the data of batch row {row[0]}: {rows[row[0]]}, {row}"
                )
    if sorted(rows) != list(range(size)):
        raise ValueError(f"the states contain {len(rows)} of {size} rows")
    return [rows[row] for row in range(size)]


def _common(values: Iterable[Value], what: str) -> Value:
    """The value that all processes have."""
    different = sorted(set(values))
    if len(different) != 1:
        raise ValueError(f"processes are at different {what}: {different}")
    return different[0]
