"""The fastest config that fits: estimate everything, compile what may win, correct the estimates by it, repeat.

Compiled next are the configs with the largest expected gain on the front of memory against time; their exact bytes and
seconds correct the estimates of similar ones (`surrogate`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from jaxmem.config import Config
from jaxmem.errors import UserError
from jaxmem.planning import Target, format_bytes, resolve_budget
from jaxmem.planning.targets import usable_memory
from jaxmem.search.candidates import Candidate, Space, candidates
from jaxmem.search.compilers import CompilerPool, RefusedError, compile_target
from jaxmem.search.knobs import DEFAULT_ALLOW, KNOBS, Knob, allowed
from jaxmem.search.result import Fit
from jaxmem.search.trials import Trial, Trials

SLACK = 0.05  # error that an estimate may have
UNLIKELY = 0.01
NEIGHBOURHOODS = 3  # of the best of the estimated front, which a search looks around
COMPILES = 20  # steps to compile at most, by default


def fit(
    cfg: Config,
    target: str | None = None,
    *,
    allow: Sequence[str] = DEFAULT_ALLOW,
    reserve_gib: float | None = None,
    compiles: int = COMPILES,
    processes: int | None = None,
) -> Fit:
    """Search for the configs that fit a target such as `h100-80gb:8` (default: this machine's devices), fastest first.

    `allow`: what may change (`knobs.KNOBS` lists the settings of each word). `compiles`: steps to compile at most.
    `processes`: compiler processes, by default as many as there are cores and memory for.
    """
    aim = compile_target(target)
    cfg = resolve_budget(cfg, aim, reserve_gib)
    with CompilerPool(aim, reserve_gib, processes) as compilers:
        return search(cfg, aim, allow, compilers, compiles=compiles)


def search(
    cfg: Config, target: Target, allow: Sequence[str], compilers: CompilerPool, *, compiles: int = COMPILES
) -> Fit:
    start = time.perf_counter()
    if compiles < 1:
        raise UserError(f"compiles={compiles} is too small; give 1 or more")
    trials = Trials(target, usable_memory(target, cfg, compilers.reserve_gib))
    space = Space(cfg, target, allowed(allow))
    trials.all = [Trial.of(one) for one in space.start()]
    if space.is_sampled:
        _look_around(trials, space)
    left = compiles
    while left > 0 and (chosen := _next(trials, min(left, compilers.processes))):
        left -= len(chosen)
        _compile(chosen, compilers.step, trials.record_step, compilers)
        trials.update_estimates()
    if not trials.compiled:
        reasons = [one.refused for one in trials.all if one.refused]
        raise UserError(f"{cfg.name} on {target.name}: none of {len(reasons)} configs compiles: {reasons[0]}")
    # The other phases of all on the front; where one does not fit, another trial takes its place.
    while unknown := [one for one in trials.front() if one.phases is None]:
        _compile(unknown, compilers.phases, trials.record_phases, compilers)
    helps = None if trials.front() else _most_helpful_change(trials, compilers)
    return Fit(cfg, target, trials, tuple(allow), time.perf_counter() - start, helps)


def _look_around(trials: Trials, space: Space) -> None:
    """Add everything one setting away from the best of the sample, until that finds nothing better."""
    seen: set[Config] = set()
    while new := [one for one in trials.front(trials.all, slack=SLACK)[:NEIGHBOURHOODS] if one.cfg not in seen]:
        for one in new:
            seen.add(one.cfg)
            trials.all += [Trial.of(other) for other in space.around(one.candidate)]


def _next(trials: Trials, count: int) -> list[Trial]:
    """The trials to compile next: by expected gain; while none is likely to fit, the smallest, if still smaller than
    those compiled."""
    open_ = [one for one in trials.all if one.is_open]
    any_fits = any(trials.fits(one) for one in trials.compiled)
    if not any_fits and not any(trials.fit_probability(one) > UNLIKELY for one in open_):
        smallest = min((one.total for one in trials.compiled), default=float("inf"))
        return [one for one in sorted(open_, key=lambda one: one.total)[:count] if one.total < smallest]
    value = zip(trials.compile_value(open_), open_, strict=True) if open_ else ()
    return [one for _, one in sorted(value, key=lambda pair: -pair[0])[:count]]


def _compile(
    chosen: Sequence[Trial],
    ask: Callable[[Config], Any],
    record: Callable[[Trial, Any], None],
    compilers: CompilerPool,
) -> None:
    by_config = {one.cfg: one for one in chosen}
    for cfg, answer in compilers.each(ask, by_config):
        if isinstance(answer, RefusedError):
            by_config[cfg].refused = str(answer)
        else:
            record(by_config[cfg], answer)


def _most_helpful_change(trials: Trials, compilers: CompilerPool) -> str | None:
    """Nothing fits: of all single changes to the smallest config, also those not allowed, the one that saves most."""
    smallest = min(trials.compiled, key=lambda one: one.total)
    length = Knob("", lambda cfg, _: [{"data.sequence_length": cfg.data.sequence_length // 2}])
    found: list[tuple[int, str, Candidate]] = []
    for knob in (*KNOBS, length):
        others = candidates(smallest.cfg, trials.target, [knob])[1:]
        found += [(one.estimate.total, knob.allow, one) for one in others]
    for _, word, best in sorted(found, key=lambda one: one[0])[:1]:
        for _, answer in compilers.each(compilers.step, [best.cfg]):
            if not isinstance(answer, RefusedError) and answer.total < smallest.total:
                allow = f" (allow {word})" if word else ""
                return f"{' '.join(best.overrides)}{allow}: {format_bytes(answer.total)}"
    return None
