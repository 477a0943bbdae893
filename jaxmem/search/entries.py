"""What a search knows of its candidates: estimates that learn from what was compiled, and who is on the front."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from jaxmem.config import Config
from jaxmem.planning import Target
from jaxmem.search.candidates import Candidate
from jaxmem.search.facts import Facts

MATERIAL = 0.01  # a config on the front needs less by so much than each faster one
SLOWEST = 3.0  # and takes no more than so many times as long as the fastest
NEAR = 0.25  # what a compiled config tells of another, less for each setting that differs


@dataclass
class Entry:
    """A candidate: estimated, and where it was worth it compiled."""

    candidate: Candidate
    total: float  # bytes of the largest phase: compiled, or expected
    seconds: float
    facts: Facts | None = None
    phases: dict[str, int] | None = None  # beside the step
    refused: str | None = None

    @classmethod
    def of(cls, one: Candidate) -> Entry:
        return cls(one, one.estimate.total, one.estimate.seconds or 0.0)

    @property
    def cfg(self) -> Config:
        return self.candidate.cfg

    @property
    def is_open(self) -> bool:
        return self.facts is None and self.refused is None

    @property
    def kinds(self) -> dict[str, int]:
        """Bytes of a step by what they are."""
        if self.facts:
            return dict(self.facts.kinds)
        parts = {part: size for part, size in self.candidate.estimate.parts.items() if part != "activations"}
        return parts | self.candidate.estimate.kinds


@dataclass
class Entries:
    """All candidates of a search."""

    target: Target
    limit: int  # bytes of a device
    all: list[Entry] = field(default_factory=list)

    @property
    def compiled(self) -> list[Entry]:
        return [one for one in self.all if one.facts]

    def fits(self, one: Entry, slack: float = 0.0) -> bool:
        """Of a compiled one the same as its plan says; of another what is expected, which may be wrong by `slack`."""
        host = one.facts.host if one.facts else 0
        limit = self.limit if one.facts else (1 + slack) * self.limit
        return one.refused is None and one.total <= limit and host <= self.target.host_memory

    def learn(self, one: Entry, facts: Facts) -> None:
        one.facts, one.total, one.seconds = facts, facts.total, facts.seconds

    def learn_phases(self, one: Entry, phases: dict[str, int]) -> None:
        one.phases, one.total = phases, max(one.total, *phases.values())

    def expect(self) -> None:
        """Estimates of what is not compiled, corrected by those that are, the more alike the more."""
        told = [one for one in self.compiled if one.facts]
        sizes = [one for one in told if one.facts and not one.facts.recomputed]
        for one in self.all:
            if one.is_open:
                guess = one.candidate.estimate
                assert guess.seconds is not None
                one.total = guess.total * _correction(one, sizes, lambda known: known.candidate.estimate.total, _total)
                one.seconds = guess.seconds * _correction(
                    one, told, lambda known: known.candidate.estimate.seconds or 1.0, lambda known: known.seconds
                )

    def front(self, among: Iterable[Entry] | None = None, slack: float = 0.0) -> list[Entry]:
        """Those that fit and of which no faster one needs as little, fastest first."""
        chosen: list[Entry] = []
        fitting = (one for one in (self.compiled if among is None else among) if self.fits(one, slack))
        for one in sorted(fitting, key=lambda one: (one.seconds, one.total)):
            if chosen and one.seconds > SLOWEST * chosen[0].seconds:
                break
            if not chosen or one.total < (1 - MATERIAL) * chosen[-1].total:
                chosen.append(one)
        return chosen

    @property
    def error(self) -> dict[str, float] | None:
        """Of the estimate made before anything was compiled: share of the compiled total, median and largest. What XLA
        squeezed into the memory by computing values again has no total to compare with."""
        off = sorted(
            abs(one.candidate.estimate.total / one.facts.total - 1)
            for one in self.compiled
            if one.facts and not one.facts.recomputed
        )
        return {"median": off[len(off) // 2], "largest": off[-1], "compared": len(off)} if off else None


def _total(known: Entry) -> float:
    assert known.facts
    return known.facts.total


def _correction(
    one: Entry, told: Sequence[Entry], guess: Callable[[Entry], float], found: Callable[[Entry], float]
) -> float:
    weights = [NEAR ** one.candidate.distance(known.candidate) for known in told]
    if not weights:
        return 1.0
    logs = (w * math.log(found(known) / guess(known)) for w, known in zip(weights, told, strict=True))
    return math.exp(sum(logs) / sum(weights))
