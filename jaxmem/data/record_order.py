"""The order in which records are read: held-out share, shuffle, epochs, mixture, computed from record numbers.

It is built on grain's map datasets: `order[k]` is the k-th record of an endless order, found in O(1) memory and time,
so that a position is one number and each row of a batch has its own position. Epoch e of a source is order[e * n : (e +
1) * n], with another permutation in each epoch. A class that replaces a part of grain (shuffle of blocks, weights of a
mixture) states the reason. Changing an order would change runs that resume.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any, Protocol, Self

import numpy as np

from jaxmem.data.files import locate
from jaxmem.errors import UserError

Record = tuple[int, int]  # source, record of it


class SourceOrder(Protocol):
    """An endless order of the records of one source; its length is an epoch."""

    def __len__(self) -> int: ...
    def __getitem__(self, place: int, /) -> Record: ...


MAX_TABLE_RECORDS = 2**16  # that a table shuffles; grain's cipher, used for more records, is slow for few


def mix64(values: np.ndarray) -> np.ndarray:
    """Steele, Lea, Flood 2014 (SplitMix64): a pseudorandom bijection of 64-bit numbers.

    Not numpy's generators, which may change between releases.
    """
    values = values.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def held_out_records(count: int, share: float) -> np.ndarray:
    """The numbers of the records kept for evaluation, sorted: those that hash below the share.

    Data that grows at its end keeps its split. At least one record is held out if the share is above 0. Takes 8 bytes
    per held-out record.
    """
    if not share:
        return np.zeros(0, np.int64)
    if count < 2:
        raise UserError(f"data.held_out={share:g} requires at least 2 records, not {count}; use data.held_out=0")
    below = np.uint64(share * 2**64)
    parts = (np.arange(start, min(start + 2**16, count)) for start in range(0, count, 2**16))
    numbers = np.concatenate([part[mix64(part) < below] for part in parts])
    if len(numbers) in (0, count):  # few records: at least one in each split
        extreme = np.argmin(mix64(np.arange(count)))
        numbers = np.array([extreme]) if not len(numbers) else np.delete(numbers, extreme)
    return numbers


class _TrainingRecords:
    """The records of a source that are not held out, by their place among them."""

    def __init__(self, source: int, count: int, excluded: np.ndarray) -> None:
        self._source = source
        self._length = count - len(excluded)
        self._excluded = excluded
        self._before = excluded - np.arange(len(excluded))  # the number of training records before each held-out record

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Record:
        return self._source, index + int(np.searchsorted(self._before, index, side="right"))

    def block_lengths(self, blocks: np.ndarray) -> np.ndarray:
        """The number of training records in each of consecutive runs of records with these lengths."""
        ends = np.cumsum(blocks)
        left = np.diff(ends - np.searchsorted(self._excluded, ends), prepend=0)
        return left[left > 0]


class _HeldOutRecords:
    """The held-out records, in a fixed pseudorandom order."""

    def __init__(self, source: int, excluded: np.ndarray) -> None:
        self._source = source
        self._records = excluded[np.argsort(mix64(excluded))]

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> Record:
        return self._source, int(self._records[index])


class _BlockShuffle:
    """A grain selection map: blocks in random order, and the records of each block in random order. grain shuffles
    either all records, which reads a Parquet row group per record, or a window, whose position is not one number."""

    def __init__(self, lengths: np.ndarray, seed: int) -> None:
        self._lengths = lengths
        self._seed = seed
        self._starts = np.cumsum(lengths) - lengths
        self._count = int(lengths.sum())
        # The rows of a batch are close together, so few blocks are in use at a time (of two epochs where they meet).
        self._blocks = lru_cache(4)(self._blocks_of)
        self._within = lru_cache(16)(self._within_block)

    def _blocks_of(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        order = permutation(len(self._lengths), mix_seed(self._seed, epoch))
        return order, np.cumsum(self._lengths[order])

    def _within_block(self, epoch: int, block: int) -> np.ndarray:
        return permutation(int(self._lengths[block]), mix_seed(self._seed, epoch, block))

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[int, int]:
        epoch, place = divmod(index, self._count)
        blocks, ends = self._blocks(epoch)
        turn, record = locate(ends, place)
        block = int(blocks[turn])
        return 0, int(self._starts[block] + self._within(epoch, block)[record])


class WeightedSelection:
    """The source of the k-th record of a mixture, so that each has its share of any prefix.

    Of k records, the other sources together provide their share, rounded, and the source of the largest weight provides
    the rest. The records of the other sources are divided among them in the same way. So the difference between the
    records of a source and its share is at most half a record for two sources, one for three, two for twenty. Weights
    are exact, in integers; grain's mixture rounds weights to hundredths of the smallest.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        # For each source: its number, and the share of the later sources in the weight of this and the later sources,
        # as numerator and denominator.
        self._later_shares: list[tuple[int, int, int]] = []
        sources = sorted(range(len(weights)), key=lambda source: -weights[source])
        exact = [Fraction(weights[source]) for source in sources]
        for i, source in enumerate(sources):
            later_share = sum(exact[i + 1 :], Fraction(0)) / sum(exact[i:], Fraction(0))
            self._later_shares.append((source, later_share.numerator, later_share.denominator))

    def counts(self, total: int) -> list[int]:
        """How many of the first `total` records each source provides."""
        counts = [0] * len(self._later_shares)
        for source, later_share, total_weight in self._later_shares:
            later = round_half_up(total * later_share, total_weight)
            counts[source] = total - later
            total = later
        return counts

    def __getitem__(self, index: int) -> tuple[int, int]:
        before = index
        after = index + 1  # records of this source and the later sources
        for source, later_share, total_weight in self._later_shares:
            later_before, later_after = (round_half_up(k * later_share, total_weight) for k in (before, after))
            if later_after == later_before:
                return source, before - later_before
            before = later_before
            after = later_after
        raise AssertionError("unreachable: the last source provides every record that no other source provides")


class RecordOrder:
    """An endless order of the records of all sources; its length is the records until a source begins again.
    `parts`: the order within each source."""

    def __init__(self, parts: Sequence[SourceOrder], weights: Sequence[float]) -> None:
        self._parts = parts
        self._selection = WeightedSelection(weights)
        self._length = self.records(1)

    @classmethod
    def of_held_out(cls, counts: Sequence[int], weights: Sequence[float], share: float) -> Self:
        """The order of the held-out records, which is not repeated. `counts`: the records of each source."""
        if not share:
            raise UserError("data.held_out=0 leaves no record for evaluation; use e.g. data.held_out=0.02")
        parts = [_HeldOutRecords(source, held_out_records(count, share)) for source, count in enumerate(counts)]
        return cls(parts, weights)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, place: int) -> tuple[int, Any]:
        source, index = self._selection[place]
        return self._parts[source][index]

    def records(self, epochs: int) -> int:
        """The number of records until one would be read more often than `epochs` times."""
        most = [epochs * len(part) for part in self._parts]

        def exceeds(total: int) -> bool:
            return any(map(int.__gt__, self._selection.counts(total + 1), most))

        return bisect_right(range(sum(most)), 0, key=exceeds)


def round_half_up(numerator: int, denominator: int) -> int:
    return (2 * numerator + denominator) // (2 * denominator)


def permutation(length: int, seed: int) -> np.ndarray:
    return np.argsort(mix64(np.arange(length) + (seed << 20)), kind="stable")


def mix_seed(*numbers: int) -> int:
    """A 32-bit seed from several numbers."""
    state = np.zeros(1, np.uint64)
    for number in numbers:
        state = mix64(state ^ np.uint64(number % 2**64))
    return int(state[0]) >> 32


def training_order(
    counts: Sequence[int],
    weights: Sequence[float],
    blocks: Sequence[np.ndarray | None],
    *,
    held_out: float,
    seed: int,
    shuffle: bool,
) -> RecordOrder:
    """An endless order; its length is an epoch.

    Args:
        counts: the number of records of each source.
        weights: the weight of each source in the mixture.
        blocks: the blocks of records that are read together, of each source; None: single records.
        held_out: the share of records that are not used for training.
        seed: of the random order.
        shuffle: whether the order is random.
    """
    import grain

    parts = []
    for source, (count, runs) in enumerate(zip(counts, blocks, strict=True)):
        training = _TrainingRecords(source, count, held_out_records(count, held_out))
        part = grain.MapDataset.source(training)
        if runs is None and len(training) <= MAX_TABLE_RECORDS:
            runs = np.array([count])
        if shuffle and runs is not None:
            order = _BlockShuffle(training.block_lengths(runs), mix_seed(seed, source))
            part = grain.MapDataset.select_from_datasets([part], order)
        elif shuffle and len(training) < 2**32:
            part = part.shuffle(seed=mix_seed(seed, source))
        elif shuffle:
            raise UserError(f"data.shuffle supports at most 2^32 records, not {len(training)}; use data.shuffle=false")
        parts.append(part)
    return RecordOrder(parts, weights)
