"""The fastest config that fits: estimate all configs, compile the most promising, correct the estimates, repeat.

The configs with the largest expected gain on the Pareto front of memory and time are compiled next. Their exact bytes
and seconds correct the estimates of similar configs (`surrogate`).
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxmem.config import Config
from jaxmem.planning import format_bytes
from jaxmem.planning.targets import usable_memory
from jaxmem.planning.units import format_seconds
from jaxmem.search.candidates import Candidate, Space
from jaxmem.search.compilers import CompilerPool, RefusedError
from jaxmem.search.knobs import Knob
from jaxmem.search.trials import SLACK, Trials

UNLIKELY = 0.01  # a config with a smaller probability of fitting is unlikely to fit
NEIGHBOURHOODS = 3  # the number of configs, the fastest of the estimated front, whose neighbours are added
WORTHWHILE = 0.01  # least expected gain for which a step is compiled
Progress = Callable[[str], None]


class Search:
    """A search among all configs that some knobs make of one config."""

    def __init__(self, cfg: Config, knobs: Sequence[Knob], compilers: CompilerPool, progress: Progress) -> None:
        self._space, self._compilers, self._progress = Space(cfg, compilers.target, knobs), compilers, progress
        limit = usable_memory(compilers.target, cfg, compilers.reserve_gib)
        self.trials = Trials(compilers.target, limit, self._space.start())
        if self._space.is_sampled:
            self._look_around()

    def compile(self, most: int) -> int:
        """Compile the steps of at most `most` configs that may be on the front, then all phases of the configs on the
        front. Returns the number of compiled steps."""
        left = most
        while left > 0 and (chosen := self._next(min(left, self._compilers.processes))):
            left -= len(chosen)
            self._compile_steps(chosen)
        self._compile_phases()
        return most - left

    def compile_until_one_fits(self, most: int) -> None:
        for _ in range(most):
            if not self.trials.front() and (chosen := self._next(1)):
                self._compile_steps(chosen)
                self._compile_phases()

    def add_other_kernels(self) -> None:
        """Add configs that differ from the fastest one in the implementation of an operation."""
        for one in self.trials.front()[:1]:
            self.trials.all += self._space.with_other_kernels(one)
            self.trials.update_estimates()

    def _look_around(self) -> None:
        """Add all configs that differ in a single setting from the best of a sample, until no added config is
        better."""
        seen, trials = set[Config](), self.trials
        while new := [one for one in trials.front(trials.all, slack=SLACK)[:NEIGHBOURHOODS] if one.cfg not in seen]:
            for one in new:
                seen.add(one.cfg)
                trials.all += self._space.around(one)

    def _next(self, count: int) -> list[Candidate]:
        """The candidates to compile next, by expected gain. While no candidate is likely to fit: those with the least
        memory, if they need less than all compiled candidates."""
        trials = self.trials
        open_ = [one for one in trials.all if one.is_open]
        any_fits = any(trials.fits(one) for one in trials.compiled)
        if not any_fits and not any(trials.fit_probability(one) > UNLIKELY for one in open_):
            smallest = min((one.total for one in trials.compiled), default=float("inf"))
            return [one for one in sorted(open_, key=lambda one: one.total)[:count] if one.total < smallest]
        values = zip(trials.compile_value(open_), open_, strict=True) if open_ else ()
        best = sorted(values, key=lambda pair: -pair[0])[:count]
        return [one for value, one in best if value > WORTHWHILE or not any_fits]

    def _compile_steps(self, chosen: Sequence[Candidate]) -> None:
        for one, cost in self._compile(chosen, self._compilers.step):
            one.cost, one.total, one.seconds = cost, cost.total, cost.seconds
        self.trials.update_estimates()
        for one in chosen:
            cost = f"{format_bytes(one.total)}, {format_seconds(one.seconds)} per step"
            if shortage := self.trials.shortage(one):
                cost += f": does not fit, {shortage}"
            self._progress(f"compiled {one.description}: {one.refused or cost}")

    def _compile_phases(self) -> None:
        """Compile the other phases of all candidates on the front. If a phase does not fit, the candidate leaves the
        front, and the phases of its successor are compiled."""
        while unknown := [one for one in self.trials.front() if one.phases is None]:
            for one, phases in self._compile(unknown, self._compilers.phases):
                one.phases = phases
                name, size = max(phases.items(), key=lambda phase: phase[1])
                if size > one.total:
                    one.total = size
                    self._progress(f"{one.description}: phase {name} needs more than the step, {format_bytes(size)}")
            for one in unknown:
                if not self.trials.fits(one):
                    self._progress(f"{one.description}: does not fit, {one.refused or self.trials.shortage(one)}")

    def _compile(self, chosen: Sequence[Candidate], ask: Callable[[Config], Any]) -> Iterator[tuple[Candidate, Any]]:
        """Candidates with their answers; a candidate that does not compile is marked instead."""
        by_config = {one.cfg: one for one in chosen}
        for cfg, answer in self._compilers.each(ask, by_config):
            if isinstance(answer, RefusedError):
                by_config[cfg].refused = str(answer)
            else:
                yield by_config[cfg], answer
