"""Batches for training and evaluation: the inputs of a step, and the position in the data.

The rows of the global batch are numbered row-major over [accumulate, B], B = global_size / accumulate: row a * B + b. A
process passes its columns b (by default all) and gets arrays [accumulate, its columns, ...]. The contents of a row
depend only on its number (see `packing`, `buckets`), not on the number of processes.

If a split ends (held-out data; training with `data.epochs`), rows end at different steps: a row that has ended is
padding (mask 0) until all rows have ended, so that each record is seen exactly as often as requested. Then iteration
stops. A process with some of the rows does not know when the other rows end: it calls `agree`.

Batches are built ahead in a thread of grain; `state` is the position after the last batch that was returned.
"""

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Self

import numpy as np

from jaxmem.config.sections import Config
from jaxmem.data.buckets import BucketRows
from jaxmem.data.corpus import Corpus, Split
from jaxmem.data.packing import Batch, OrderedRecords, Rows, TextRows
from jaxmem.errors import UserError

BUILT_AHEAD = 2  # batches, in addition to the one being built

State = dict[str, Any]


class Loader(AbstractContextManager["Loader"]):
    """Iterates over the batches of a split, from the beginning or from a restored state.

    `corpus`: the corpus of another loader, to share its index of the files. `agree`: a function of whether this process
    has data left that returns whether any process has; it is called once per batch if the split ends.
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
        from grain.experimental import ThreadPrefetchDatasetIterator

        self._owns_corpus, self.corpus = corpus is None, corpus or Corpus(cfg)
        self._global_size, self._agree = cfg.batch.global_size, agree
        columns = cfg.batch.global_size // cfg.batch.accumulate
        rows = range(columns) if rows is None else rows
        if not rows or min(rows) < 0 or max(rows) >= columns:
            raise ValueError(f"rows {rows}: expected some of the {columns} columns of the batch")
        own = np.arange(cfg.batch.accumulate)[:, None] * columns + np.asarray(rows)
        order = self.corpus.order(split)
        epochs = cfg.data.epochs if split == "train" else 1
        self._ends = epochs is not None
        total = epochs * len(order) if epochs is not None else sys.maxsize
        if split == "train" and total * self.corpus.sources[0].documents_per_record < cfg.batch.global_size:
            raise UserError(
                f"data.epochs={epochs} of {len(order)} records is less than one batch of batch.global_size="
                f"{cfg.batch.global_size}; decrease batch.global_size or increase data.epochs"
            )
        batches = _rows(cfg, self.corpus, order, own, total)
        self._open = [ThreadPrefetchDatasetIterator(batches, BUILT_AHEAD)]  # empty when it is closed
        self._stop = weakref.finalize(self, _close, self._open)  # grain's destructor would fail while Python exits
        self._start = self._batches.get_state()

    @property
    def _batches(self) -> Any:
        if not self._open:
            raise ValueError("the loader is closed")
        return self._open[0]

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        position = self._batches.get_state()
        has_data, batch = next(self._batches)
        if self._ends and not (self._agree(has_data) if self._agree else has_data):
            self._batches.set_state(position)
            raise StopIteration
        return batch

    def state(self) -> State:
        """The position after the last batch that was returned, for JSON: the rows of this process as [row, record,
        token], or the position of all buckets."""
        found = self._batches.get_state()
        return {"step": found["step"], "global_size": self._global_size} | found

    def restore(self, state: State) -> None:
        """Continues at a position that `state` or `merge_states` returned, for any number of processes."""
        if state["global_size"] != self._global_size:
            raise UserError(
                f"batch.global_size={self._global_size} differs from that of the checkpoint; "
                f"use batch.global_size={state['global_size']}"
            )
        self._batches.set_state(state)

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


def _close(batches: list[Any]) -> None:
    while batches:
        batches.pop().close()


def _rows(cfg: Config, corpus: Corpus, order: Any, rows: np.ndarray, total: int) -> Rows:
    """The rows with these numbers, of `total` records in this order."""
    data, stride, first = cfg.data, cfg.batch.global_size, corpus.sources[0]
    if not cfg.reads_text:
        from jaxmem.data.images import ImageRows, ImageSource

        assert isinstance(first, ImageSource)
        return ImageRows(cfg, first, order, rows, total)
    records = OrderedRecords(
        documents=lambda place: corpus.documents(*order[place]),
        total=total,
        per_record=first.documents_per_record,
        length=lambda place: corpus.length(*order[place]),
        references=(lambda place: corpus.reference(order[place][1])) if cfg.objective.name == "dpo" else None,
    )
    if data.buckets:
        return BucketRows(records, rows, stride, data.lengths)
    most = data.documents_per_row if data.packing else None
    return TextRows(records, rows, stride, data.sequence_length, most)


def merge_states(states: Iterable[State]) -> State:
    """One position from the positions of all processes, to be saved. Processes with the same row must agree on it.

    >>> one = {"step": 3, "global_size": 2, "rows": [[0, 5, 17]]}
    >>> merge_states([one, {"step": 3, "global_size": 2, "rows": [[1, 4, 2]]}])
    {'step': 3, 'global_size': 2, 'rows': [[0, 5, 17], [1, 4, 2]]}
    """
    states = list(states)
    if "own" in states[0]:
        counts, iterators = zip(*((state["own"], state["iterator"]) for state in states), strict=True)
        if len(set(counts)) != 1:
            raise ValueError(f"processes are at different batches: {sorted(set(counts))}")
        return {"own": counts[0], "iterators": iterators}
    if "rows" not in states[0]:  # with buckets, the position of all processes is the same
        if any(state != states[0] for state in states):
            raise ValueError("processes are at different positions in the data")
        return states[0]
    common = {(state["step"], state["global_size"]) for state in states}
    if len(common) != 1:
        raise ValueError(f"processes are at different (step, global_size): {sorted(common)}")
    [(step, size)] = common
    rows: dict[int, list[int]] = {}
    for state in states:
        for row in state["rows"]:
            if rows.setdefault(row[0], list(row)) != list(row):
                raise ValueError(
                    f"processes are at different positions in the data of batch row {row[0]}: {rows[row[0]]}, {row}"
                )
    if sorted(rows) != list(range(size)):
        raise ValueError(f"the states contain {len(rows)} of {size} rows")
    return {"step": step, "global_size": size, "rows": [rows[row] for row in range(size)]}
