"""What a search knows of its candidates: estimates that learn from what was compiled, and who is on the front."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from jaxmem.config import Config
from jaxmem.planning import Target
from jaxmem.search.candidates import Candidate
from jaxmem.search.facts import Facts
from jaxmem.search.learned import SPREAD, Alike, chance, gain, learned

MATERIAL = 0.01  # a config on the front needs less by so much than each faster one
SLOWEST = 3.0  # and takes no more than so many times as long as the fastest
SMALLER = 0.3  # what a share of the memory is worth, in shares of the time


@dataclass
class Entry:
    """A candidate: estimated, and where it was worth it compiled."""

    candidate: Candidate
    total: float  # bytes of the largest phase: compiled, or expected
    seconds: float
    total_spread: float = SPREAD  # of their logarithms, where they are expected
    seconds_spread: float = SPREAD
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
    def host(self) -> int:
        """Bytes of a device's share of host memory."""
        return self.facts.host if self.facts else self.candidate.estimate.host

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
        limit = self.limit if one.facts else (1 + slack) * self.limit
        return one.refused is None and one.total <= limit and one.host <= self.target.host_memory

    def learn(self, one: Entry, facts: Facts) -> None:
        one.facts, one.total, one.seconds = facts, facts.total, facts.seconds

    def learn_phases(self, one: Entry, phases: dict[str, int]) -> None:
        one.phases, one.total = phases, max(one.total, *phases.values())

    def expect(self) -> None:
        """Estimates of what is not compiled, corrected by those that are. What XLA squeezed into the memory by
        computing values again says nothing of bytes."""
        alike = Alike([one.candidate.settings for one in self.all])
        facts = {place: one.facts for place, one in enumerate(self.all) if one.facts}
        guesses = [one.candidate.estimate for one in self.all]
        bytes_off = {at: math.log(f.total / guesses[at].total) for at, f in facts.items() if not f.recomputed}
        time_off = {at: math.log(f.seconds / (guesses[at].seconds or 1.0)) for at, f in facts.items()}
        if bytes_off:
            for one, off, spread in zip(self.all, *learned(alike, bytes_off), strict=True):
                if one.is_open:
                    one.total, one.total_spread = one.candidate.estimate.total * math.exp(off), spread
        if time_off:
            for one, off, spread in zip(self.all, *learned(alike, time_off), strict=True):
                if one.is_open:
                    one.seconds, one.seconds_spread = (one.candidate.estimate.seconds or 1.0) * math.exp(off), spread

    def chance(self, one: Entry) -> float:
        """That it fits."""
        below = math.log(self.limit / one.total) if one.total else 0.0
        return chance(below, one.total_spread) if one.host <= self.target.host_memory else 0.0

    def worth(self, open_: Sequence[Entry]) -> list[float]:
        """Of each, what compiling it should gain: a faster one that fits, or the same time in less memory, the less the
        slower. Where nothing is known to fit, whether it does, and how fast."""
        front = self.front()
        if not front:
            fastest = min(one.seconds for one in open_)
            return [self.chance(one) * (fastest / one.seconds) ** 2 for one in open_]
        return [self._gain(one, front) for one in open_]

    def _gain(self, one: Entry, front: Sequence[Entry]) -> float:
        best = front[0].seconds
        faster = self.chance(one) * gain(math.log(best / one.seconds), one.seconds_spread)
        if one.seconds > SLOWEST * best:
            return faster
        beside = [other.total for other in front if other.seconds <= one.seconds]
        smaller = gain(math.log(min(beside, default=self.limit) / one.total), one.total_spread)
        return faster + SMALLER * smaller * min(1.0, best / one.seconds)

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
