"""Search: estimate everything, compile what may win, learn from it, until the front stands.

Estimates come first and cost a millisecond each. Then, over and over, those configs are compiled from which most is to
be gained on the front of memory against time, and what they really take corrects the estimates of their like
(`learned.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from jaxmem.config import Config
from jaxmem.errors import UserError
from jaxmem.planning import Target, readable
from jaxmem.planning.targets import usable
from jaxmem.search.candidates import Candidate, Space, begun, candidates
from jaxmem.search.compilers import Compilers, RefusedError
from jaxmem.search.entries import Entries, Entry
from jaxmem.search.knobs import KNOBS, Knob, allowed
from jaxmem.search.result import Fit

SLACK = 0.05  # an estimate may be wrong by so much
UNLIKELY = 0.01
BEST = 3  # of the estimated front, around which a search looks
COMPILES = 20  # programs of steps, unless told otherwise


def search(cfg: Config, target: Target, allow: Sequence[str], compilers: Compilers, *, compiles: int = COMPILES) -> Fit:
    """The fastest configs that fit, among all that `allow` permits."""
    start = time.perf_counter()
    if compiles < 1:
        raise UserError(f"compiles: {compiles} should be 1 or more")
    known = Entries(target, usable(target, cfg, compilers.reserve_gib))
    space = Space(cfg, target, allowed(allow))
    known.all = [Entry.of(one) for one in begun(space, cfg, target)]
    if space.is_sampled:
        _look_around(known, space)
    left = compiles
    while left > 0 and (chosen := _next(known, min(left, compilers.processes))):
        left -= len(chosen)
        _compile(known, chosen, compilers)
        known.expect()
    if not known.compiled:
        tried = [one.refused for one in known.all if one.refused]
        raise UserError(f"{cfg.name} on {target.name}: of {len(tried)} configs tried none compiles: {tried[0]}")
    _complete(known, compilers)
    helps = None if known.front() else _what_helps(known, compilers)
    return Fit(cfg, target, known, tuple(allow), time.perf_counter() - start, helps)


def _look_around(known: Entries, space: Space) -> None:
    """What was not in the sample: all that is one setting away from the best of it, until that finds nothing better."""
    seen: set[Config] = set()
    while new := [one for one in known.front(known.all, slack=SLACK)[:BEST] if one.cfg not in seen]:
        for one in new:
            seen.add(one.cfg)
            known.all += [Entry.of(other) for other in space.around(one.candidate)]


def _next(known: Entries, count: int) -> list[Entry]:
    """What to compile now: what should gain most. Where nothing is likely to fit the smallest, while they shrink."""
    open_ = [one for one in known.all if one.is_open]
    fitting = [one for one in known.compiled if known.fits(one)]
    if not fitting and not any(known.chance(one) > UNLIKELY for one in open_):
        beaten = min((one.total for one in known.compiled), default=float("inf"))
        return [one for one in sorted(open_, key=lambda one: one.total)[:count] if one.total < beaten]
    worth = zip(known.worth(open_), open_, strict=True) if open_ else ()
    return [one for _, one in sorted(worth, key=lambda pair: -pair[0])[:count]]


def _compile(known: Entries, chosen: Sequence[Entry], compilers: Compilers) -> None:
    _learn(chosen, compilers.step, known.learn, compilers)


def _complete(known: Entries, compilers: Compilers) -> None:
    """The other phases of a run, of all on the front: where one of them does not fit, the next step up."""
    while unknown := [one for one in known.front() if one.phases is None]:
        _learn(unknown, compilers.phases, known.learn_phases, compilers)


def _learn(
    chosen: Sequence[Entry], ask: Callable[[Config], Any], learn: Callable[[Entry, Any], None], compilers: Compilers
) -> None:
    of = {one.cfg: one for one in chosen}
    for cfg, answer in compilers.each(ask, of):
        if isinstance(answer, RefusedError):
            of[cfg].refused = str(answer)
        else:
            learn(of[cfg], answer)


def _what_helps(known: Entries, compilers: Compilers) -> str | None:
    """Nothing fits: of all single changes to the smallest config, also those that were not allowed, the best one."""
    smallest = min(known.compiled, key=lambda one: one.total, default=None)
    if smallest is None:
        return None
    length = Knob("", lambda cfg, _: [{"data.sequence_length": cfg.data.sequence_length // 2}])
    found: list[tuple[int, str, Candidate]] = []
    for knob in (*KNOBS, length):
        others = candidates(smallest.cfg, known.target, [knob])[1:]
        found += [(one.estimate.total, knob.allow, one) for one in others]
    for _, word, best in sorted(found, key=lambda one: one[0])[:1]:
        for _, answer in compilers.each(compilers.step, [best.cfg]):
            if not isinstance(answer, RefusedError) and answer.total < smallest.total:
                allow = f" (allow {word})" if word else ""
                return f"{' '.join(best.overrides)}{allow}: {readable(answer.total)}"
    return None
