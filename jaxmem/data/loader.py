"""Batches for training and evaluation: what a step takes in, and where in the data it stands.

The rows of the global batch are numbered row-major over [accumulate, B], B = global_size / accumulate:
row a * B + b. A process names the columns b that it holds (all of them by default) and gets arrays
[accumulate, its columns, ...]. What a row holds depends on its number alone (see `packing`, `buckets`), never
on the number of processes.

Where a split ends (held out; training with `data.epochs`), rows run out at different steps: a row that
has ended is padding (mask 0) until all have, so that each record is seen exactly as often as asked and
nothing twice. Then iteration stops. A process that holds some of the rows cannot know when the others
end: it asks them through `agree`.

A thread builds batches ahead; `state` is the position of what was taken, not of what was built.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np

from jaxmem.config.sections import Config
from jaxmem.data.ahead import Ahead
from jaxmem.data.buckets import BucketRows
from jaxmem.data.corpus import Corpus, Split
from jaxmem.data.digits import DigitRows, Digits
from jaxmem.data.packing import Batch, Document, TextRows
from jaxmem.data.preference import PairRows, Preferences
from jaxmem.errors import UserError

Spec = tuple[tuple[int, ...], Any, tuple[str, ...]]  # shape, dtype, logical axes
State = dict[str, Any]


Rows = TextRows | BucketRows | DigitRows


class _Producer:
    """Builds batches one after another: (some row had data, batch). Runs in a thread of its own."""

    def __init__(self, rows: Rows) -> None:
        self._rows, self._step = rows, 0

    def __next__(self) -> tuple[bool, Batch]:
        going = not self._rows.ended
        self._step += 1
        return going, self._rows.batch()

    def get_state(self) -> State:
        return {"step": self._step, **self._rows.place}

    def set_state(self, state: State) -> None:
        self._rows.place = state
        self._step = state["step"]


class Loader:
    """Iterates over the batches of a split, from the beginning or from a restored state.

    `corpus`: another loader's, to share its index of the files. `agree`: given whether this process has
    rows left, returns whether any process has; called once a batch where the split ends.
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
        self._owns_corpus, self.corpus = corpus is None, corpus or Corpus(cfg)
        self._global_size, self._agree = cfg.batch.global_size, agree
        columns = cfg.batch.global_size // cfg.batch.accumulate
        rows = range(columns) if rows is None else rows
        if not rows or min(rows) < 0 or max(rows) >= columns:
            raise ValueError(f"rows {rows}: expected some of the {columns} columns of the batch")
        self._rows = np.arange(cfg.batch.accumulate)[:, None] * columns + np.asarray(rows)
        order = self.corpus.order(split)
        epochs = cfg.data.epochs if split == "train" else 1
        self._ends = epochs is not None
        total = epochs * len(order) if epochs is not None else sys.maxsize
        each = 2 if isinstance(self.corpus.sources[0], Preferences) else 1  # rows that a record fills
        if split == "train" and total * each < cfg.batch.global_size:
            raise UserError(
                f"data.epochs={epochs} of {len(order)} records are fewer records than batch.global_size="
                f"{cfg.batch.global_size}; lower batch.global_size or raise data.epochs"
            )
        self._batches = Ahead(_Producer(_rows(cfg, self.corpus, order, self._rows, total)))
        self._start = self._batches.get_state()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        position = self._batches.get_state()
        going, batch = next(self._batches)
        if self._ends and not (self._agree(going) if self._agree else going):
            self._batches.set_state(position)
            raise StopIteration
        return batch

    def state(self) -> State:
        """The position after the last batch taken, for JSON: this process's rows as [row, record, token], or what all
        processes know of buckets."""
        found = self._batches.get_state()
        return {"step": found["step"], "global_size": self._global_size} | found

    def restore(self, state: State) -> None:
        """Goes to a position that `state` or `merge_states` gave, of any division into processes."""
        if state["global_size"] != self._global_size:
            raise UserError(
                f"batch.global_size is {self._global_size}, but the saved position in the data is that of "
                f"{state['global_size']} rows; set it back to {state['global_size']}"
            )
        self._batches.set_state(state)

    def rewind(self) -> None:
        """Back to the beginning of the split."""
        self._batches.set_state(self._start)

    def close(self) -> None:
        """Stops the thread; closes the files unless the corpus is shared."""
        self._batches.close()
        if self._owns_corpus:
            self.corpus.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _rows(cfg: Config, corpus: Corpus, order: Any, rows: np.ndarray, total: int) -> Rows:
    """What builds the rows of these numbers, of `total` records in this order."""
    data, stride, first = cfg.data, cfg.batch.global_size, corpus.sources[0]
    if isinstance(first, Digits):
        return DigitRows(cfg, first, order, rows, total)
    if isinstance(first, Preferences):

        def answer(place: int, number: int) -> Document:
            return first.document(order[place][1], number)

        def reference(place: int) -> np.ndarray:
            return corpus.reference(order[place][1])

        if not data.buckets:
            return PairRows(answer, reference, rows, stride, total, data.sequence_length)
        both = lambda place: [answer(place, number) for number in (0, 1)]  # noqa: E731
        return BucketRows(both, lambda _: None, rows, stride, total, data.lengths, 2, reference)

    def document(place: int) -> Document:
        return corpus.document(*order[place])

    if not data.buckets:
        return TextRows(document, rows, stride, total, data.sequence_length, data.packing)
    length = lambda place: corpus.length(*order[place])  # noqa: E731
    return BucketRows(lambda place: [document(place)], length, rows, stride, total, data.lengths)


def merge_states(states: Iterable[State]) -> State:
    """One position of the positions of all processes, to be saved; rows that several hold must agree.

    >>> one = {"step": 3, "global_size": 2, "rows": [[0, 5, 17]]}
    >>> merge_states([one, {"step": 3, "global_size": 2, "rows": [[1, 4, 2]]}])
    {'step': 3, 'global_size': 2, 'rows': [[0, 5, 17], [1, 4, 2]]}
    """
    states = list(states)
    if "rows" not in states[0]:  # of buckets all know all
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
                raise ValueError(f"two processes are at different positions of row {row[0]}: {rows[row[0]]}, {row}")
    if sorted(rows) != list(range(size)):
        raise ValueError(f"the states hold {len(rows)} of {size} rows")
    return {"step": step, "global_size": size, "rows": [rows[row] for row in range(size)]}
