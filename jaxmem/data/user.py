"""Batches that a script passes, instead of the batches that `data` describes.

Each item of the iterable is a dict of arrays with the rows of this process, one micro-batch after the other. The
position in the data is the state of the iterator if it has one (grain: `get_state`, `set_state`), otherwise the number
of batches, which are skipped when a run resumes.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import islice
from typing import Any

import jax
import numpy as np

from jaxmem.config.sections import Config
from jaxmem.data.corpus import Corpus, Split
from jaxmem.data.loader import Loader
from jaxmem.data.packing import Batch, Position
from jaxmem.errors import UserError
from jaxmem.step.batches import batch_spec


class UserLoader(AbstractContextManager["UserLoader"]):
    """The interface of `Loader` for batches of a script. It is its own `corpus`. `agree`: as in `Loader`."""

    def __init__(
        self, cfg: Config, split: Split, rows: Sequence[int], agree: Callable[[bool], bool] | None = None
    ) -> None:
        batches = cfg.user.data if split == "train" else cfg.user.held_out
        if batches is None:
            raise UserError(
                "train.evaluate_every requires the argument held_out; pass an iterable of batches, or set"
                " train.evaluate_every=null"
            )
        self._cfg = cfg
        self._rows = rows
        self._batches = batches
        self.corpus = self
        self._spec = batch_spec(cfg)
        self._repeats = split == "train" and batches.repeats
        self._agree = agree
        self.rewind()

    def rewind(self) -> None:
        """Returns to the beginning."""
        self._iterator = iter(self._batches)
        self._count = 0

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        batch = self._following()
        has_data = batch is not None
        if self._agree is not None and not self._repeats:
            has_data = self._agree(has_data)
        if not has_data:
            raise StopIteration
        if batch is None:
            raise UserError(
                f"{self._batches.argument}: this process has no batch {self._count + 1}, but another one has; give all"
                " processes the same number of batches"
            )
        return batch

    def _following(self) -> Batch | None:
        """The next batch of this process, or None after the last."""
        batch = next(self._iterator, None)
        if batch is None and self._repeats:
            self._iterator = iter(self._batches)
            batch = next(self._iterator, None)
            if batch is None:
                raise UserError(
                    f"{self._batches.argument} has no batch when it is read again; use a list or an iterator"
                )
        if batch is None:
            return None
        self._count += 1
        return self._placed(self._batches.arrays(batch))

    def _placed(self, arrays: dict[str, np.ndarray]) -> Batch:
        """The batch [micro-batches, rows, ...] with the names and shapes that the step reads; otherwise an error."""
        count = self._cfg.batch.accumulate
        rows = len(self._rows) * count
        for name, array in arrays.items():
            dims = self._spec[name][0][2:] if name in self._spec else array.shape[1:]
            if array.shape != (rows, *dims):
                raise self._error(
                    f"{name} has shape {list(array.shape)}, not {[rows, *dims]}; the first dimension must be this"
                    " process's share of batch.global_size"
                )
        batch = {name: array.reshape(count, -1, *array.shape[1:]) for name, array in arrays.items()}
        if self._cfg.objective.name != "own":
            batch = with_defaults(batch)
        batch = {"mask": np.ones((count, len(self._rows)), np.float32), **batch}
        if batch.keys() != self._spec.keys():
            names, expected = (", ".join(sorted(given.keys() - {"mask"})) for given in (batch, self._spec))
            raise UserError(
                f"{self._batches.argument}: batch {self._count} has the arrays {names}; expected {expected}"
            )
        if self._cfg.reads_text:
            self._check_text(batch)
        elif self._cfg.objective.name == "classify":
            self._check_targets(batch, "outputs")
        return {name: batch[name].astype(dtype, copy=False) for name, (_, dtype, _) in self._spec.items()}

    def _error(self, problem: str) -> UserError:
        return UserError(f"{self._batches.argument}: batch {self._count}: {problem}")

    def _check_text(self, batch: Batch) -> None:
        self._check_numbers("inputs", batch["inputs"], "vocab")
        self._check_targets(batch, "vocab")
        segments = batch["segment_ids"]
        begins = (segments[..., 1:] != segments[..., :-1]) & (segments[..., 1:] > 0)  # a document, within a row
        if begins.any() and not self._cfg.data.packing:
            raise self._error("segment_ids has a document that begins within a row; use data.packing=true")

    def _check_targets(self, batch: Batch, key: str) -> None:
        self._check_numbers("targets", np.where(batch["mask"] > 0, batch["targets"], 0), key, ", or set its mask to 0")

    def _check_numbers(self, name: str, values: np.ndarray, key: str, use: str = "") -> None:
        """Refuses tokens or classes that the model does not have: losses would ignore them, with finite values."""
        count = getattr(self._cfg.model, key, None)
        if count is None:  # a model of the script
            return
        wrong = values[(values < 0) | (values >= count)]
        if wrong.size:
            raise self._error(f"{name} has the value {wrong[0]}; with model.{key}={count} use 0 to {count - 1}{use}")

    def state(self) -> Position:
        """The position after the last batch that was returned."""
        get = getattr(self._iterator, "get_state", None)
        place = get() if get else None
        return {"own": self._count, "iterator": {"bytes": place.hex()} if isinstance(place, bytes) else place}

    def restore(self, state: Position) -> None:
        self.rewind()
        places = state["iterators"]
        place = places[jax.process_index()] if len(places) == jax.process_count() else None
        if place is not None and hasattr(self._iterator, "set_state"):
            iterator: Any = self._iterator
            is_bytes = isinstance(iterator.get_state(), bytes)
            iterator.set_state(bytes.fromhex(place["bytes"]) if is_bytes else place)
            self._count = state["own"]
            return
        for _ in islice(iter(self._following, None), state["own"]):  # processes need not wait for each other
            pass

    def check(self) -> float:
        self._placed(self._batches.first)
        return 0.0  # the length of documents is unknown

    def summary(self, *_: object) -> list[str]:
        return []

    def close(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def with_defaults(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A batch for one of jaxmem's losses of texts: `inputs` [..., time] suffice. The target of a token is the next
    token of its document; each row is one document. Targets below 0 (-100 in PyTorch) have mask 0."""
    inputs = batch.get("inputs")
    if inputs is None or inputs.ndim != 3:
        return batch
    segments = batch.get("segment_ids", np.ones(inputs.shape, np.int32))
    is_target = segments > 0  # 0: padding
    continues = segments[..., :-1] == segments[..., 1:]  # the next token belongs to the same document
    if "targets" in batch:
        is_target &= batch["targets"] >= 0
    else:
        is_target[..., :-1] &= continues
        is_target[..., -1] = False
        batch = {**batch, "mask": batch.get("mask", 1) * is_target}
    index = np.arange(inputs.shape[-1], dtype=np.int32)
    starts = np.where(continues, 0, index[1:])  # of the document of each token
    defaults = {
        "targets": np.concatenate([inputs[..., 1:], inputs[..., -1:]], axis=-1),
        "positions": index - np.pad(np.maximum.accumulate(starts, axis=-1), [(0, 0), (0, 0), (1, 0)]),
        "segment_ids": segments,
        "mask": is_target,
    }
    return {**defaults, **batch}


def open_loader(
    cfg: Config,
    split: Split,
    rows: Sequence[int],
    *,
    corpus: Corpus | None = None,
    agree: Callable[[bool], bool] | None,
) -> Any:
    """The batches of a split: of a script, or as `data` describes them. The arguments are those of `Loader`."""
    if cfg.user.data is not None:
        return UserLoader(cfg, split, rows, agree)
    return Loader(cfg, split, rows, corpus=corpus, agree=agree)
