"""The order of records: a permutation each epoch, weights to the record, a split that never leaks."""

from collections import Counter
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jaxmem.data import record_order as order
from jaxmem.errors import UserError


def training(
    count: int, *, held_out: float = 0.0, seed: int = 0, shuffle: bool = True, blocks: list[int] | None = None
):
    runs = None if blocks is None else np.array(blocks)
    return order.training_order([count], [1.0], [runs], held_out=held_out, seed=seed, shuffle=shuffle)


def test_hashes_stay_what_they_are() -> None:
    # From the reference implementation of SplitMix64 with seed 0: its first outputs.
    states = np.arange(3, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    assert [hex(x) for x in order.mix64(states).tolist()] == [
        "0xe220a8397b1dcdaf",
        "0x6e789e6aa1b965f4",
        "0x6c45d188009454f",
    ]


@given(st.integers(1, 300), st.floats(0, 0.99), st.booleans(), st.integers(0, 5))
def test_each_epoch_holds_each_training_record_once(count: int, share: float, shuffle: bool, seed: int) -> None:
    if share and count < 2:
        return
    held = set(order.held_out_records(count, share).tolist())
    found = training(count, held_out=share, shuffle=shuffle, seed=seed)
    assert len(found) == count - len(held) > 0
    for epoch in range(3):
        records = [found[epoch * len(found) + i][1] for i in range(len(found))]
        assert sorted(records) == sorted(set(range(count)) - held)
        assert shuffle or records == sorted(records)


def test_held_out_records_are_the_share_asked_for_and_read_once_in_a_fixed_order() -> None:
    held = order.held_out_records(50_000, 0.02)
    assert 900 < len(held) < 1100
    assert np.all(np.diff(held) > 0)
    assert set(order.held_out_records(60_000, 0.02).tolist()) >= set(held.tolist())  # data that grows keeps its split
    found = order.RecordOrder.of_held_out([50_000], [1.0], 0.02)
    records = [found[i][1] for i in range(len(found))]
    assert sorted(records) == held.tolist()
    assert records[:20] != sorted(records)[:20]


@pytest.mark.parametrize("share", [1e-9, 0.5, 0.999999])
def test_few_records_leave_at_least_one_on_each_side(share: float) -> None:
    for count in (2, 3, 5):
        assert 1 <= len(order.held_out_records(count, share)) < count
    with pytest.raises(UserError, match=r"requires at least 2 records, not 1.*held_out=0"):
        order.held_out_records(1, share)


def test_another_seed_and_another_epoch_are_other_orders() -> None:
    one, two = training(100, seed=1), training(100, seed=2)
    first = [one[i] for i in range(100)]
    assert first != [one[100 + i] for i in range(100)]
    assert first != [two[i] for i in range(100)]
    assert first == [training(100, seed=1)[i] for i in range(100)]


@pytest.mark.exhaustive
@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.sampled_from([0.0, 0.3]))
def test_blocks_stay_together_and_each_epoch_is_complete(blocks: list[int], share: float) -> None:
    count = sum(blocks)
    if count < 2:
        return
    found = training(count, blocks=blocks, held_out=share)
    held = set(order.held_out_records(count, share).tolist())
    block_of = np.repeat(np.arange(len(blocks)), blocks)
    for epoch in range(3):
        records = [found[epoch * len(found) + i][1] for i in range(len(found))]
        assert sorted(records) == sorted(set(range(count)) - held)
        seen = [block_of[record] for record in records]
        assert sum(a != b for a, b in pairwise(seen)) == len(set(seen)) - 1


def test_blocks_come_in_another_order_each_epoch() -> None:
    found = training(200, blocks=[10] * 20)
    first, second = ([found[epoch * 200 + i][1] // 10 for i in range(0, 200, 10)] for epoch in (0, 1))
    assert first != second
    assert [found[i][1] for i in range(10)] != sorted(found[i][1] for i in range(10))


@given(st.lists(st.floats(0.01, 100), min_size=2, max_size=6))
@example([1.0, 1.0, 1.0, 7.0])
@example([50.0, 49.0, 0.01])
def test_a_mixture_keeps_its_weights_in_every_prefix(weights: list[float]) -> None:
    lengths = [40 + 13 * i for i in range(len(weights))]
    found = order.training_order(lengths, weights, [None] * len(weights), held_out=0.0, seed=0, shuffle=False)
    total = sum(map(Fraction, weights))
    taken: Counter[int] = Counter()
    for k in range(200):
        source, record = found[k]
        assert record == taken[source] % lengths[source]  # no record skipped, none twice in a pass
        taken[source] += 1
        for i, weight in enumerate(weights):
            exact = (k + 1) * Fraction(weight) / total
            assert abs(taken[i] - exact) <= {2: 0.5, 3: 1.0}.get(len(weights), 1.5)
        if k < len(found):
            assert all(taken[i] <= lengths[i] for i in taken)  # an epoch repeats nothing


@given(st.lists(st.floats(0.01, 100), min_size=2, max_size=5), st.integers(1, 4))
@example([0.5, 3.7], 3)
def test_epochs_of_a_mixture_read_no_record_more_often(weights: list[float], epochs: int) -> None:
    lengths = [13 + 75 * i for i in range(len(weights))]
    found = order.training_order(lengths, weights, [None] * len(weights), held_out=0.0, seed=0, shuffle=False)
    total = found.records(epochs)
    assert max(Counter(found[k] for k in range(total)).values()) <= epochs
    assert max(Counter(found[k] for k in range(total + 1)).values()) == epochs + 1
