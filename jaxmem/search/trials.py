"""The candidates of a search with their bytes and seconds: estimated, corrected by the surrogate, or compiled."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxmem.config import Config, save_config
from jaxmem.errors import UserError
from jaxmem.planning import Target
from jaxmem.search.candidates import Candidate
from jaxmem.search.surrogate import PRIOR_STD, Covariance, expected_improvement, posterior, probability_below
from jaxmem.search.worker import StepCost

MATERIAL = 0.01  # a config on the front needs this share less memory than each faster one
SLOWEST = 3.0  # configs slower than so many times the fastest step are not on the front
SLACK = 0.05  # relative error that an estimate may have
PER_CHANGE = 0.99  # factor of the expected gain for each setting that changes
MEMORY_WEIGHT = 0.3  # weight of a relative saving of memory; that of time is 1


@dataclass
class Trial:
    """A candidate with its bytes and seconds, estimated or compiled."""

    candidate: Candidate
    total: float  # bytes per device in the largest phase
    seconds: float  # seconds of a step
    total_std: float = PRIOR_STD  # standard deviation of log(total), while it is estimated
    seconds_std: float = PRIOR_STD
    cost: StepCost | None = None  # cost of the compiled step
    phases: dict[str, int] | None = None  # bytes of the other compiled phases
    refused: str | None = None  # the reason if it does not compile

    @classmethod
    def of(cls, candidate: Candidate) -> Trial:
        seconds = candidate.estimate.seconds or 0.0
        return cls(candidate, candidate.estimate.total, seconds, refused=candidate.error)

    @property
    def cfg(self) -> Config:
        return self.candidate.cfg

    @property
    def overrides(self) -> str:
        return shlex.join(self.candidate.overrides) or "no change"

    @property
    def is_open(self) -> bool:
        return self.cost is None and self.refused is None

    @property
    def host(self) -> int:
        """Bytes of host memory per device."""
        return self.cost.host if self.cost else self.candidate.estimate.host

    @property
    def kinds(self) -> dict[str, int]:
        """Bytes of a step by kind."""
        if self.cost:
            return dict(self.cost.kinds)
        parts = {part: size for part, size in self.candidate.estimate.parts.items() if part != "activations"}
        return parts | self.candidate.estimate.kinds


@dataclass
class Trials:
    """All candidates of a search."""

    target: Target
    limit: int  # bytes per device
    all: list[Trial] = field(default_factory=list)

    @property
    def compiled(self) -> list[Trial]:
        return [one for one in self.all if one.cost]

    def fits(self, one: Trial, slack: float = 0.0) -> bool:
        """Whether a trial fits. An estimate may exceed the limit by the share `slack`; compiled bytes may not."""
        limit = self.limit if one.cost else (1 + slack) * self.limit
        return one.refused is None and one.total <= limit and one.host <= self.target.host_memory

    def record_step(self, one: Trial, cost: StepCost) -> None:
        one.cost, one.total, one.seconds = cost, cost.total, cost.seconds

    def record_phases(self, one: Trial, phases: dict[str, int]) -> None:
        one.phases, one.total = phases, max(one.total, *phases.values())

    def update_estimates(self) -> None:
        """Correct the estimates of open trials by the compiled ones. A step in which XLA recomputes values to stay
        within memory says nothing about bytes."""
        covariance = Covariance([one.candidate.settings for one in self.all])
        guesses = [one.candidate.estimate for one in self.all]
        costs = {index: one.cost for index, one in enumerate(self.all) if one.cost}
        bytes_error = {at: math.log(c.total / guesses[at].total) for at, c in costs.items() if not c.recomputed}
        time_error = {at: math.log(c.seconds / (guesses[at].seconds or 1.0)) for at, c in costs.items()}
        if bytes_error:
            for one, error, std in zip(self.all, *posterior(covariance, bytes_error), strict=True):
                if one.is_open:
                    one.total, one.total_std = one.candidate.estimate.total * math.exp(error), std
        if time_error:
            for one, error, std in zip(self.all, *posterior(covariance, time_error), strict=True):
                if one.is_open:
                    one.seconds, one.seconds_std = (one.candidate.estimate.seconds or 1.0) * math.exp(error), std

    def fit_probability(self, one: Trial) -> float:
        if one.host > self.target.host_memory:
            return 0.0
        return probability_below(math.log(self.limit / one.total) if one.total else 0.0, one.total_std)

    def compile_value(self, trials: Sequence[Trial]) -> list[float]:
        """The expected gain of compiling each trial: a faster config that fits, or the same time in less memory. While
        no trial is known to fit, it is the probability that the trial fits, times its relative speed squared."""
        front = self.front()
        if not front:
            fastest = min(one.seconds for one in trials)
            values = [self.fit_probability(one) * (fastest / one.seconds) ** 2 for one in trials]
        else:
            values = [self._expected_gain(one, front) for one in trials]
        return [PER_CHANGE**one.candidate.distance * value for one, value in zip(trials, values, strict=True)]

    def _expected_gain(self, one: Trial, front: Sequence[Trial]) -> float:
        best = front[0].seconds
        faster = self.fit_probability(one) * expected_improvement(math.log(best / one.seconds), one.seconds_std)
        if one.seconds > SLOWEST * best:
            return faster
        as_fast = [other.total for other in front if other.seconds <= one.seconds]
        smaller = expected_improvement(math.log(min(as_fast, default=self.limit) / one.total), one.total_std)
        return faster + MEMORY_WEIGHT * smaller * min(1.0, best / one.seconds)

    def front(self, among: Iterable[Trial] | None = None, slack: float = 0.0) -> list[Trial]:
        """The Pareto front of time and memory among trials that fit (by default the compiled ones), fastest first."""
        chosen: list[Trial] = []
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
        errors = sorted(
            abs(one.candidate.estimate.total / one.cost.total - 1)
            for one in self.compiled
            if one.cost and not one.cost.recomputed
        )
        return {"median": errors[len(errors) // 2], "largest": errors[-1], "compared": len(errors)} if errors else None


def save_best(cfg: Config | None, path: str | Path) -> None:
    """The best config of a search as a file for `train`."""
    if cfg is None:
        raise UserError(f"cannot write {path}: no config fits")
    save_config(cfg, path)


def target_json(target: Target, limit: int) -> dict[str, Any]:
    return {"name": target.name, "devices": target.count, "limit_bytes": limit}
