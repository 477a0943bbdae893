"""The candidates of a search: which fit, which are on the Pareto front, and which to compile next."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxmem.config import save_settings
from jaxmem.errors import UserError
from jaxmem.planning import Target, format_bytes
from jaxmem.search.candidates import Candidate
from jaxmem.search.surrogate import encode, expected_improvement, posterior, probability_below

MATERIAL = 0.01  # a config on the front needs at least this share less memory than each faster config
SLOWEST = 3.0  # a config on the front takes at most this multiple of the time of the fastest
SLACK = 0.05  # relative error that an estimate may have
PER_CHANGE = 0.99  # factor of the expected gain for each setting that changes
MEMORY_WEIGHT = 0.3  # weight of a relative saving of memory; the weight of a saving of time is 1


@dataclass
class Trials:
    """All candidates of a search."""

    target: Target
    limit: int  # bytes per device
    all: list[Candidate] = field(default_factory=list)

    @property
    def compiled(self) -> list[Candidate]:
        return [one for one in self.all if one.cost]

    def fits(self, one: Candidate, slack: float = 0.0) -> bool:
        """Whether a candidate fits. An estimate may exceed the limit by the share `slack`; compiled bytes may not."""
        limit = self.limit if one.cost else (1 + slack) * self.limit
        return one.refused is None and one.total <= limit and one.host <= self.target.host_memory

    def shortage(self, one: Candidate) -> str:
        """The memory that a candidate needs, of each kind that is not sufficient; empty if it fits."""
        needs = (("device memory", one.total, self.limit), ("host memory", one.host, self.target.host_memory))
        found = [f"{format_bytes(size)} of {format_bytes(limit)} {kind}" for kind, size, limit in needs if size > limit]
        return f"needs {'' if one.cost else 'about '}{' and '.join(found)}" if found else ""

    def update_estimates(self) -> None:
        """Correct the estimates of open candidates by the compiled candidates. The bytes of a step in which XLA
        recomputes values to stay within memory are not used."""
        encoded = encode([one.settings for one in self.all])
        costs = {index: one.cost for index, one in enumerate(self.all) if one.cost}
        guesses = [one.estimate for one in self.all]
        bytes_error = {at: math.log(c.total / guesses[at].total) for at, c in costs.items() if not c.recomputed}
        time_error = {at: math.log(c.seconds / (guesses[at].seconds or 1.0)) for at, c in costs.items()}
        if bytes_error:
            for one, error, std in zip(self.all, *posterior(encoded, bytes_error), strict=True):
                if one.is_open:
                    one.total, one.total_std = one.estimate.total * math.exp(error), std
        if time_error:
            for one, error, std in zip(self.all, *posterior(encoded, time_error), strict=True):
                if one.is_open:
                    one.seconds, one.seconds_std = (one.estimate.seconds or 1.0) * math.exp(error), std

    def fit_probability(self, one: Candidate) -> float:
        if one.host > self.target.host_memory:
            return 0.0
        return probability_below(math.log(self.limit / one.total) if one.total else 0.0, one.total_std)

    def compile_value(self, candidates: Sequence[Candidate]) -> list[float]:
        """The expected gain of compiling each candidate: a faster config that fits, or the same time in less memory.
        While no candidate is known to fit, it is the probability of fitting, times the relative speed squared."""
        front = self.front()
        if not front:
            fastest = min(one.seconds for one in candidates)
            values = [self.fit_probability(one) * (fastest / one.seconds) ** 2 for one in candidates]
        else:
            values = [self._expected_gain(one, front) for one in candidates]
        return [PER_CHANGE**one.distance * value for one, value in zip(candidates, values, strict=True)]

    def _expected_gain(self, one: Candidate, front: Sequence[Candidate]) -> float:
        best = front[0].seconds
        faster = self.fit_probability(one) * expected_improvement(math.log(best / one.seconds), one.seconds_std)
        if one.seconds > SLOWEST * best:
            return faster
        as_fast = [other.total for other in front if other.seconds <= one.seconds]
        smaller = expected_improvement(math.log(min(as_fast, default=self.limit) / one.total), one.total_std)
        return faster + MEMORY_WEIGHT * smaller * min(1.0, best / one.seconds)

    def front(self, among: Iterable[Candidate] | None = None, slack: float = 0.0) -> list[Candidate]:
        """The Pareto front of time and memory among candidates that fit (by default compiled ones), fastest first."""
        chosen: list[Candidate] = []
        fitting = (one for one in (self.compiled if among is None else among) if self.fits(one, slack))
        for one in sorted(fitting, key=lambda one: (one.seconds, one.total)):
            if chosen and one.seconds > SLOWEST * chosen[0].seconds:
                break
            if not chosen or one.total < (1 - MATERIAL) * chosen[-1].total:
                chosen.append(one)
        return chosen

    @property
    def estimate_error(self) -> dict[str, float] | None:
        """Relative error of the first estimates, median and largest, over the compiled steps in which XLA recomputed
        nothing."""
        costs = [(one.estimate.total, one.cost) for one in self.all if one.cost]
        errors = sorted(abs(guess / cost.total - 1) for guess, cost in costs if not cost.recomputed)
        return {"median": errors[len(errors) // 2], "largest": errors[-1], "compared": len(errors)} if errors else None


def save_best(best: Candidate | None, path: str | Path) -> None:
    """Writes the best config of a search as a file for `train`."""
    if best is None:
        raise UserError(f"cannot write {path}: no config fits")
    save_settings(best.cfg, path)


def target_json(target: Target, limit: int) -> dict[str, Any]:
    return {"name": target.name, "devices": target.count, "limit_bytes": limit}
