"""Batches of records of alike length: what each holds, that none is lost, and that a position is exact."""

import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmem import data
from jaxmem.config.sections import Config
from jaxmem.data.buckets import BucketRows
from jaxmem.data.packing import Batch, OrderedRecords
from jaxmem.data.records import Document

Make = Callable[..., Config]
LENGTHS = (2, 5, 9)


def rows_of(lengths: list[int], batch: int, own: range | None = None, *, known: bool = False) -> BucketRows:
    """Record i is its number, as often as its length says."""

    def read(place: int) -> list[Document]:
        return [Document(np.full(lengths[place], place + 1, np.int32))]

    numbers = np.array(own or range(batch))[None]
    records = OrderedRecords(read, range(len(lengths)).__contains__, length=lambda p: lengths[p] if known else None)
    return BucketRows(records, numbers, batch, LENGTHS)


def batches_of(rows: BucketRows) -> list[Batch]:
    found = []
    while not rows.has_ended:
        found.append(rows.batch())
    return found


@given(st.lists(st.integers(0, 12), max_size=30), st.integers(1, 4))
def test_every_record_comes_once_in_the_shortest_rows_that_hold_its_batch(lengths: list[int], batch: int) -> None:
    seen: list[int] = []
    for made in batches_of(rows_of(lengths, batch)):
        real = (made["segment_ids"][0] > 0).sum(axis=1)
        time = made["inputs"].shape[-1]
        shorter = max((length for length in LENGTHS if length < time), default=-1)
        filled = real > 0
        assert (real[filled] > shorter).all()
        assert made["mask"][0].sum() == sum(lengths[n - 1] - 1 if lengths[n - 1] <= time else time
                                            for n in made["inputs"][0][filled, 0])  # fmt: skip
        seen += made["inputs"][0][filled, 0].tolist()
    assert sorted(seen) == [place + 1 for place, length in enumerate(lengths) if length]
    of_bucket = {n: [p for p in seen if np.searchsorted(LENGTHS, min(lengths[p - 1], 9)) == n] for n in range(3)}
    assert all(places == sorted(places) for places in of_bucket.values())  # nobody is overtaken in a bucket


@given(st.lists(st.integers(0, 12), max_size=30), st.booleans())
def test_processes_and_resumed_runs_make_the_batches_of_one(lengths: list[int], known: bool) -> None:
    whole, places = rows_of(lengths, 4, known=known), []
    made = []
    while not whole.has_ended:
        places.append(json.loads(json.dumps(whole.position)))
        made.append(whole.batch())
    halves = [batches_of(rows_of(lengths, 4, range(start, start + 2))) for start in (0, 2)]
    for batch, *parts in zip(made, *halves, strict=True):
        for name, array in batch.items():
            np.testing.assert_array_equal(np.concatenate([part[name] for part in parts], axis=1), array)
    for start, place in enumerate(places):
        again = rows_of(lengths, 4)
        again.position = place
        for batch, other in zip(batches_of(again), made[start:], strict=True):
            for name, array in batch.items():
                np.testing.assert_array_equal(other[name], array)


def test_the_loader_divides_them_into_micro_batches_and_knows_lengths_from_a_cache(
    config: Make, numbered: str, tmp_path: Path
) -> None:
    """120 records of 1 to 41 tokens; all processes have one position."""
    options = {"buckets": (8, 20), "sequence_length": 41, "packing": False, "global_size": 4, "accumulate": 2}
    cfg = config(path=numbered, epochs=1, **options)
    with data.Loader(cfg) as loader, data.Loader(cfg, rows=[1]) as other:
        batches, others = list(islice(loader, 9)), list(islice(other, 9))
        assert data.merge_states([loader.state(), other.state()]) == loader.state()
        assert loader.state()["step"] == 9
        batches += list(loader)
    for batch, part in zip(batches, others, strict=False):
        np.testing.assert_array_equal(batch["inputs"][:, 1:], part["inputs"])
    assert {batch["inputs"].shape for batch in batches} == {(2, 2, length) for length in (8, 20, 41)}
    ends = sum(int((batch["inputs"] == 256).sum()) for batch in batches)
    assert ends == 120
    assert sum(batch["inputs"].size for batch in batches) < 0.7 * 120 * 41  # what unpacked rows would be
    made = tmp_path / "cache"
    data.tokenize(cfg, made)
    with data.Loader(config(source="tokens", path=str(made), epochs=1, **options)) as loader:
        for batch, same in zip(loader, batches, strict=True):
            np.testing.assert_array_equal(batch["inputs"], same["inputs"])


def test_both_answers_of_a_pair_lie_in_one_batch(config: Make, tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    pairs = [{"prompt": "a", "chosen": "b" * (3 * i % 17), "rejected": "c" * (5 * i % 13)} for i in range(12)]
    file.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    given: dict[str, Any] = {"source": "preference", "path": str(file), "packing": False, "epochs": 1}
    cfg = config(objective="dpo", buckets=(8,), sequence_length=20, global_size=4, **given)
    with data.Loader(cfg) as loader:
        loader.corpus.references = np.arange(24, dtype=np.float32).reshape(12, 2)
        batches = list(loader)
    assert {batch["inputs"].shape[-1] for batch in batches} == {8, 20}
    for batch in batches:
        chosen, rejected = batch["reference"][0, ::2], batch["reference"][0, 1::2]
        there = rejected > 0
        assert (rejected[there] == chosen[there] + 1).all()
        for row, reference in zip(batch["inputs"][0], batch["reference"][0], strict=True):
            if reference:
                pair, answer = divmod(int(reference), 2)
                letter = ("chosen", "rejected")[answer]
                assert bytes(row[row < 256].astype(np.uint8)).strip(b"\0").decode() == "a" + pairs[pair][letter]


def test_bucketed_positions_that_differ_are_refused() -> None:
    state = {"step": 1, "global_size": 2, "next": 3, "waiting": [[2], []]}
    assert data.merge_states([state, dict(state)]) == state
    with pytest.raises(ValueError, match="different positions"):
        data.merge_states([state, state | {"next": 4}])
