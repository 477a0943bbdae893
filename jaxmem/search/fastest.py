"""The fastest config that fits: estimate all configs, compile in order of estimated time, correct, repeat.

Each compiled config corrects the estimates of similar configs by its ratio of compiled to estimated bytes and seconds.
The search ends when no open config that is estimated to fit may be faster than the fastest compiled one: because it is
estimated to be faster, or almost as fast with a recompute policy that no compiled config has, since the errors of
estimates differ most between policies.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from jaxmem.config import Config, save_settings
from jaxmem.errors import UserError
from jaxmem.machine.console import Printed
from jaxmem.planning.budget import resolve_remat
from jaxmem.planning.targets import Target, usable_memory
from jaxmem.planning.units import format_bytes, format_seconds
from jaxmem.search.candidates import Candidate, Space, pareto_front
from jaxmem.search.compilers import Answer, CompilerPool, RefusedError
from jaxmem.search.knobs import Knob
from jaxmem.typing import JsonDict

MAX_SLOWDOWN = 3.0  # a config on the front takes at most this multiple of the time of the fastest
ESTIMATE_ERROR = 0.05  # relative error that an estimate may have
NEIGHBOURHOODS = 3  # neighbours are added of this number of configs, the fastest on the estimated front
Progress = Callable[[str], None]


@dataclass
class Trials:
    """All candidates of a search."""

    target: Target
    limit: int  # bytes per device
    all: list[Candidate] = field(default_factory=list)

    @property
    def compiled(self) -> list[Candidate]:
        return [candidate for candidate in self.all if candidate.cost]

    def fits(self, candidate: Candidate, slack: float = 0.0) -> bool:
        """Whether a candidate fits. An estimate may exceed the limit by the share `slack`; compiled bytes may not."""
        limit = self.limit if candidate.cost else (1 + slack) * self.limit
        return (
            candidate.refusal is None and candidate.total <= limit and candidate.host_bytes <= self.target.host_memory
        )

    def shortage(self, candidate: Candidate) -> str:
        """The memory that a candidate needs, of each kind that is not sufficient; empty if it fits."""
        needs = (
            ("device memory", candidate.total, self.limit),
            ("host memory", candidate.host_bytes, self.target.host_memory),
        )
        needed = [f"{format_bytes(x)} of {kind} ({format_bytes(top)} available)" for kind, x, top in needs if x > top]
        return f"needs {'' if candidate.cost else 'about '}{' and '.join(needed)}" if needed else ""

    def update_estimates(self) -> None:
        """Correct the estimate of each open candidate by the mean ratio of compiled to estimated values over the
        compiled candidates that have the most settings in common with it. The bytes of a step in which XLA recomputes
        values to stay within memory are not used."""
        costs = {candidate: candidate.cost for candidate in self.all if candidate.cost}
        bytes_ratios = {
            candidate: cost.total / candidate.estimate.total for candidate, cost in costs.items() if not cost.recomputed
        }
        time_ratios = {
            candidate: cost.seconds / (candidate.estimate.seconds or 1.0) for candidate, cost in costs.items()
        }
        for candidate in self.all:
            if candidate.is_pending:
                candidate.bytes_ratio = _ratio(candidate, bytes_ratios)
                candidate.seconds_ratio = _ratio(candidate, time_ratios)

    def front(self, among: Iterable[Candidate] | None = None, slack: float = 0.0) -> list[Candidate]:
        """The Pareto front of time and memory among candidates that fit (by default compiled ones), fastest first."""
        front = pareto_front(
            candidate for candidate in (self.compiled if among is None else among) if self.fits(candidate, slack)
        )
        return [candidate for candidate in front if candidate.seconds <= MAX_SLOWDOWN * front[0].seconds]


def _ratio(candidate: Candidate, ratios: Mapping[Candidate, float]) -> float:
    """The geometric mean of the ratios of the candidates that have the most settings in common with this one."""
    common = {other: sum(value == other.settings[key] for key, value in candidate.settings.items()) for other in ratios}
    most = max(common.values(), default=0)
    similar = [ratio for other, ratio in ratios.items() if common[other] == most]
    return statistics.geometric_mean(similar) if similar else 1.0


class HasConfig(Protocol):
    @property
    def cfg(self) -> Config: ...


class SearchResult(Printed):
    """What a search has found."""

    @property
    def best(self) -> HasConfig | None:
        """The result whose config `write` writes; None if nothing fits."""
        raise NotImplementedError

    def write(self, path: str | Path) -> None:
        """Writes the best config as a file for `train`."""
        if self.best is None:
            raise UserError(f"cannot write {path}: no config fits")
        save_settings(self.best.cfg, path)


def target_json(target: Target, limit: int) -> JsonDict:
    return {"name": target.name, "devices": target.count, "limit_bytes": limit}


class Search:
    """A search among all configs that differ from one config in the settings of some knobs."""

    def __init__(self, cfg: Config, knobs: Sequence[Knob], compilers: CompilerPool, progress: Progress) -> None:
        start, _ = resolve_remat(cfg, compilers.target, compilers.reserve_gib, compiles=False)
        self._space = Space(start, compilers.target, knobs, original=cfg)
        self._compilers = compilers
        self._progress = progress
        limit = usable_memory(compilers.target, cfg.memory, compilers.reserve_gib)
        self.trials = Trials(compilers.target, limit, self._space.start())
        if self._space.is_sampled:
            self._look_around()

    def compile(self, most: int) -> None:
        """Compile the steps of at most `most` configs that may be on the front, then all phases of the configs on the
        front."""
        left = most
        while left > 0 and (chosen := self._next(min(left, self._compilers.processes), self.trials.all)):
            left -= len(chosen)
            self._compile_steps(chosen)
        self._compile_phases()

    def compile_until_one_fits(self, most: int, among: Sequence[Candidate]) -> None:
        """Compile the steps and phases of at most `most` of these candidates, one after the other."""
        for _ in range(most):
            compiled = [candidate for candidate in among if candidate.cost]
            if not self.trials.front(compiled) and (chosen := self._next(1, among)):
                self._compile_steps(chosen)
                self._compile_phases()

    def _look_around(self) -> None:
        """Add all configs that differ in a single setting from the best of a sample, until no added config is
        better."""
        seen = set[Config]()
        trials = self.trials
        while new := [
            candidate
            for candidate in trials.front(trials.all, slack=ESTIMATE_ERROR)[:NEIGHBOURHOODS]
            if candidate.cfg not in seen
        ]:
            for candidate in new:
                seen.add(candidate.cfg)
                trials.all += self._space.neighbors(candidate)

    def _next(self, count: int, among: Sequence[Candidate]) -> list[Candidate]:
        """The candidates to compile next: those that are estimated to fit and may be faster than the fastest compiled
        one, fastest first. If nothing fits, those with the least memory, if they need less than all compiled ones."""
        trials = self.trials
        pending = [candidate for candidate in among if candidate.is_pending]
        compiled = [candidate for candidate in among if candidate.cost]
        fastest = min((candidate.seconds for candidate in trials.front(compiled)), default=math.inf)
        policies = {candidate.cfg.memory.remat for candidate in compiled}

        def may_be_faster(candidate: Candidate) -> bool:
            is_corrected = candidate.cfg.memory.remat in policies
            return candidate.seconds < fastest * (1.0 if is_corrected else 1 + ESTIMATE_ERROR)

        for slack in (0.0, ESTIMATE_ERROR):
            fitting = [candidate for candidate in pending if trials.fits(candidate, slack)]
            if faster := [candidate for candidate in fitting if may_be_faster(candidate)]:
                return sorted(faster, key=lambda candidate: (candidate.seconds, candidate.distance))[:count]
        if fastest < math.inf:
            return []
        smallest = min((candidate.total for candidate in compiled), default=math.inf)
        by_memory = sorted(pending, key=lambda candidate: candidate.total)
        return [candidate for candidate in by_memory[:count] if candidate.total < smallest]

    def _compile_steps(self, chosen: Sequence[Candidate]) -> None:
        for candidate, cost in self._compile(chosen, self._compilers.step):
            candidate.cost = cost
        self.trials.update_estimates()
        for candidate in chosen:
            text = f"{format_bytes(candidate.total)}, {format_seconds(candidate.seconds)} per step"
            if shortage := self.trials.shortage(candidate):
                text += f": does not fit, {shortage}"
            self._progress(f"compiled {candidate.description}: {candidate.refusal or text}")

    def _compile_phases(self) -> None:
        """Compile the other phases of all candidates on the front. If a phase does not fit, the candidate leaves the
        front, and the phases of its successor are compiled."""
        while unknown := [candidate for candidate in self.trials.front() if candidate.phases is None]:
            for candidate, phases in self._compile(unknown, self._compilers.phases):
                name, size = max(phases.items(), key=lambda phase: phase[1])
                if size > candidate.total:
                    self._progress(
                        f"{candidate.description}: phase {name} needs more than the step, {format_bytes(size)}"
                    )
                candidate.phases = phases
            for candidate in unknown:
                if not self.trials.fits(candidate):
                    self._progress(
                        f"{candidate.description}: does not fit, {candidate.refusal or self.trials.shortage(candidate)}"
                    )

    def _compile(
        self, chosen: Sequence[Candidate], ask: Callable[[Config], Answer]
    ) -> Iterator[tuple[Candidate, Answer]]:
        """Candidates with their answers; a candidate that does not compile is marked instead."""
        by_config = {candidate.cfg: candidate for candidate in chosen}
        for cfg, answer in self._compilers.ask_all(ask, by_config):
            if isinstance(answer, RefusedError):
                by_config[cfg].refusal = str(answer)
            else:
                yield by_config[cfg], answer
