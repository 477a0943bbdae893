"""Batches for training and evaluation: what a step takes in, and where in the data it stands.

The rows of the global batch are numbered row-major over [accumulate, B], B = global_size / accumulate:
row a * B + b. A process names the columns b that it holds (all of them by default) and gets arrays
[accumulate, its columns, ...]. What a row holds depends on its number alone (see `packing`), never on
the number of processes.

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
from jaxmem.data.corpus import Corpus, Split
from jaxmem.data.digits import SIZE, DigitRows, Digits, pixels_dtype
from jaxmem.data.packing import Batch, TextRows
from jaxmem.data.preference import PairRows, Preferences
from jaxmem.errors import UserError

Spec = tuple[tuple[int, ...], Any, tuple[str, ...]]  # shape, dtype, logical axes
State = dict[str, Any]


def batch_spec(cfg: Config) -> dict[str, Spec]:
    """Shape, dtype and logical axes of each array of the global batch; reads no files."""
    rows = (cfg.batch.accumulate, cfg.batch.global_size // cfg.batch.accumulate)
    axes = ("accumulate", "batch")
    if cfg.objective.reads_text:
        tokens: Spec = ((*rows, cfg.data.sequence_length), np.int32, (*axes, "time"))
        mask: Spec = (tokens[0], np.float32, tokens[2])
        found = dict.fromkeys(("inputs", "targets", "positions", "segment_ids"), tokens) | {"mask": mask}
        return found | {"reference": (rows, np.float32, axes)} if cfg.objective.name == "dpo" else found
    images: Spec = ((*rows, SIZE, SIZE, 1), pixels_dtype(cfg), (*axes, "height", "width", "channels"))
    if cfg.objective.name == "contrastive":
        second = {"pairs": images}
    else:
        second = {"targets": (rows, np.int32 if cfg.objective.name == "classify" else np.float32, axes)}
    return {"inputs": images, **second, "mask": (rows, np.float32, axes)}


class _Producer:
    """Builds batches one after another: (some row had data, batch). Runs in a thread of its own."""

    def __init__(self, rows: TextRows | DigitRows) -> None:
        self._rows, self._step = rows, 0

    def __next__(self) -> tuple[bool, Batch]:
        going = not self._rows.ended
        self._step += 1
        return going, self._rows.batch()

    def get_state(self) -> State:
        return {"step": self._step, "positions": self._rows.positions}

    def set_state(self, state: State) -> None:
        self._step, self._rows.positions = state["step"], state["positions"]


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
        built: TextRows | DigitRows
        if isinstance(self.corpus.sources[0], Digits):
            built = DigitRows(cfg, self.corpus.sources[0], order, self._rows, total)
        elif isinstance(self.corpus.sources[0], Preferences):
            pairs, reference = self.corpus.sources[0], self.corpus.reference
            built = PairRows(
                lambda place, answer: pairs.document(order[place][1], answer),
                lambda place: reference(order[place][1]),
                self._rows,
                cfg.batch.global_size,
                total,
                cfg.data.sequence_length,
            )
        else:
            corpus_document = self.corpus.document
            built = TextRows(
                lambda place: corpus_document(*order[place]),
                self._rows,
                cfg.batch.global_size,
                total,
                cfg.data.sequence_length,
                cfg.data.packing,
            )
        self._batches = Ahead(_Producer(built))
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
        """The position after the last batch taken, for JSON: this process's rows as [row, record, token]."""
        found = self._batches.get_state()
        rows = zip(self._rows.flat, found["positions"], strict=True)
        return {
            "step": int(found["step"]),
            "global_size": self._global_size,
            "rows": [[int(row), int(record), int(offset)] for row, (record, offset) in rows],
        }

    def restore(self, state: State) -> None:
        """Goes to a position that `state` or `merge_states` gave, of any division into processes."""
        if state["global_size"] != self._global_size:
            raise UserError(
                f"batch.global_size is {self._global_size}, but the saved position in the data is that of "
                f"{state['global_size']} rows; set it back to {state['global_size']}"
            )
        saved = {row: (record, offset) for row, record, offset in state["rows"]}
        lacking = [int(row) for row in self._rows.flat if row not in saved]
        if lacking:
            raise UserError(f"the saved position in the data lacks rows {lacking[:8]}: not all processes' states")
        positions = np.array([saved[int(row)] for row in self._rows.flat], np.int64)
        self._batches.set_state({"step": state["step"], "positions": positions})

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


def merge_states(states: Iterable[State]) -> State:
    """One position of the positions of all processes, to be saved; rows that several hold must agree.

    >>> one = {"step": 3, "global_size": 2, "rows": [[0, 5, 17]]}
    >>> merge_states([one, {"step": 3, "global_size": 2, "rows": [[1, 4, 2]]}])
    {'step': 3, 'global_size': 2, 'rows': [[0, 5, 17], [1, 4, 2]]}
    """
    states = list(states)
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
