"""Batches of a script: the position of an iterator with a state of its own, and defaults of arrays."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from jaxmem.config.check import check
from jaxmem.config.methods import config_with
from jaxmem.data.user import UserLoader, with_defaults
from jaxmem.errors import UserError

MODEL = {"vocab": 264, "layers": 1, "embed": 8, "mlp": 8, "heads": 1, "kv_heads": 1, "head_dim": 8}
RAW = {
    "name": "x",
    "model": MODEL,
    "data": {"sequence_length": 4},
    "batch": {"global_size": 2},
    "train": {"steps": 1},
}


class Numbers:
    """Batches whose tokens are their number, with an iterator like that of a grain loader."""

    def __init__(self, form: type) -> None:
        self.form = form  # of the state: grain.DataLoader has bytes, grain.IterDataset a dict

    def __iter__(self) -> "NumbersIterator":
        return NumbersIterator(self.form)


class NumbersIterator:
    def __init__(self, form: type) -> None:
        self.form = form
        self.number = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        self.number += 1
        return {"inputs": np.full((2, 4), self.number - 1, np.int32)}

    def get_state(self) -> Any:
        return bytes([self.number, 255]) if self.form is bytes else {"number": self.number}

    def set_state(self, state: Any) -> None:
        assert type(state) is self.form
        self.number = state[0] if self.form is bytes else state["number"]


class Exhausted:
    """An iterable around an iterator, which is empty the second time."""

    def __init__(self) -> None:
        self.batches = iter([{"inputs": np.zeros((2, 4), np.int32)}])

    def __iter__(self) -> Iterator[Any]:
        return (batch for batch in self.batches)


def test_data_that_cannot_be_read_again_is_an_error() -> None:
    loader = UserLoader(config_with(RAW, data=Exhausted()), "train", range(2))
    with pytest.raises(UserError, match="data has no batch when it is read again; use a list or an iterator"):
        [next(loader) for _ in range(2)]


@pytest.mark.parametrize("form", [bytes, dict])
def test_the_state_of_an_iterator_is_saved_and_restored(form: type) -> None:
    cfg = config_with(RAW, data=Numbers(form))
    loader = UserLoader(cfg, "train", range(2))
    assert [int(next(loader)["inputs"].max()) for _ in range(3)] == [0, 1, 2]
    state = json.loads(json.dumps(loader.state()))  # as in a checkpoint
    resumed = UserLoader(cfg, "train", range(2))
    resumed.restore({"own": state["own"], "iterators": [state["iterator"]]})
    assert int(next(resumed)["inputs"].max()) == 3


def test_checking_a_config_starts_no_iterator_again() -> None:
    class Counted:
        """Like a torch DataLoader, which starts processes for each iterator."""

        iterators = 0

        def __iter__(self) -> Iterator[Any]:
            self.iterators += 1
            return iter([{"inputs": np.zeros((2, 4), np.int32)}])

    held_out = Counted()
    raw = {"name": "x", "model": MODEL, "data": {"sequence_length": 4}, "batch": {"global_size": 2}}
    train = {"steps": 1, "evaluate_every": 1}
    cfg = config_with({**raw, "train": train}, data=[{}], held_out=held_out)
    check(cfg)
    assert held_out.iterators == 1


def test_no_token_predicts_the_next_document_or_padding() -> None:
    tokens = np.arange(6, dtype=np.int32).reshape(1, 1, 6)
    segments = np.array([[[1, 1, 2, 2, 0, 0]]], np.int32)
    packed = with_defaults({"inputs": tokens, "segment_ids": segments})
    assert packed["mask"].ravel().tolist() == [1, 0, 1, 0, 0, 0]
    assert packed["targets"].ravel().tolist() == [1, 2, 3, 4, 5, 5]
    assert with_defaults({"inputs": tokens})["mask"].ravel().tolist() == [1, 1, 1, 1, 1, 0]
    targets = {"inputs": tokens, "targets": tokens, "segment_ids": segments}
    assert with_defaults(targets)["mask"].ravel().tolist() == [1, 1, 1, 1, 0, 0]
    assert with_defaults({**targets, "mask": segments})["mask"] is segments


def test_the_last_token_of_a_document_has_no_target_though_the_mask_of_a_script_is_1() -> None:
    tokens = np.arange(6, dtype=np.int32).reshape(1, 1, 6)
    segments = np.array([[[1, 1, 2, 2, 0, 0]]], np.int32)
    ones = np.ones((1, 1, 6), np.float32)
    assert with_defaults({"inputs": tokens, "mask": ones})["mask"].ravel().tolist() == [1, 1, 1, 1, 1, 0]
    packed = with_defaults({"inputs": tokens, "mask": ones, "segment_ids": segments})
    assert packed["mask"].ravel().tolist() == [1, 0, 1, 0, 0, 0]


def test_positions_begin_at_0_in_each_document() -> None:
    segments = np.array([[[1, 2, 2, 2, 0, 0], [3, 3, 1, 2, 2, 2]]], np.uint8)
    batch = with_defaults({"inputs": np.zeros((1, 2, 6), np.int32), "segment_ids": segments})
    assert batch["positions"].tolist() == [[[0, 0, 1, 2, 0, 1], [0, 1, 0, 0, 1, 2]]]


def test_tokens_outside_of_the_vocabulary_are_refused() -> None:
    tokens = np.zeros((2, 4), np.int32)
    ignored = np.array([[5, -100, 7, 8]] * 2, np.int32)

    def first(**arrays: np.ndarray) -> dict[str, np.ndarray]:
        return next(UserLoader(config_with(RAW, data=[{"inputs": tokens, **arrays}]), "train", range(2)))

    assert first(targets=ignored)["mask"].tolist() == [[[1, 0, 1, 1]] * 2]
    with pytest.raises(UserError, match=r"data: batch 1: inputs has the value 264; with model.vocab=264 use 0 to 263$"):
        first(inputs=tokens + 264)
    with pytest.raises(UserError, match=r"batch 1: targets has the value -100; .*, or set its mask to 0"):
        first(targets=ignored, mask=np.ones((2, 4)))
    with pytest.raises(UserError, match=r"mask has shape \[2, 3\], not \[2, 4\]"):
        first(mask=np.ones((2, 3)))


def test_documents_that_begin_within_a_row_require_packing() -> None:
    def first(packing: bool, segments: list[int]) -> np.ndarray:
        raw = {**RAW, "data": {"sequence_length": 4, "packing": packing}}
        batch = {"inputs": np.zeros((2, 4), np.int32), "segment_ids": np.array([segments] * 2)}
        return next(UserLoader(config_with(raw, data=[batch]), "train", range(2)))["segment_ids"]

    assert first(True, [1, 1, 2, 0])[0, 0].tolist() == [1, 1, 2, 0]
    assert first(False, [7, 7, 0, 0])[0, 0].tolist() == [7, 7, 0, 0]
    for segments in ([1, 1, 2, 0], [0, 1, 1, 1]):
        with pytest.raises(UserError, match="batch 1: segment_ids has a document that begins within a row"):
            first(False, segments)


def test_classes_that_the_model_does_not_have_are_refused() -> None:
    model = {"family": "mlp", "layers": 1, "image_size": 2, "channels": 1, "outputs": 3}
    raw = {"name": "x", "model": model, "objective": "classify", "batch": {"global_size": 2}, "train": {"steps": 1}}

    def first(*classes: int, **arrays: Any) -> dict[str, np.ndarray]:
        batch = {"inputs": np.zeros((2, 2, 2, 1), np.float32), "targets": np.array(classes), **arrays}
        return next(UserLoader(config_with(raw, data=[batch]), "train", range(2)))

    assert first(0, 2)["targets"].tolist() == [[0, 2]]
    assert first(0, -1, mask=np.array([1, 0]))["mask"].tolist() == [[1, 0]]
    with pytest.raises(UserError, match=r"targets has the value 3; with model.outputs=3 use 0 to 2, or set its mask"):
        first(1, 3)
