"""For a run that does not fit where it should run: the nearest configs that do, each compiled before it is said.

The same candidates and estimates as a whole search, but a few seconds of compiling: of each set of settings that could
change, the fewest first, the fastest config that should fit is tried.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass

from jaxmem.errors import UserError
from jaxmem.planning import Plan, plan_program, readable
from jaxmem.search.candidates import Candidate, candidates
from jaxmem.search.knobs import BY_DEFAULT, allowed
from jaxmem.step import program

COUNT = 3  # configs to name
TRIES = 6  # compiled at most
SECONDS = 60.0  # after which no other one is tried


@dataclass(frozen=True)
class Near:
    """A config that fits, as it was compiled."""

    overrides: list[str]
    plan: Plan


def named(near: list[Near]) -> str:
    """A line for each, with its bytes."""
    if not near:
        return "nothing near it fits; `jaxmem fit` searches further"
    each = (f"  {' '.join(one.overrides)}    {readable(one.plan.compiled_step.total)}" for one in near)
    return "\n".join(["nearest that fit, each compiled:", *each])


def nearest_that_fit(planned: Plan) -> list[Near]:
    """Up to three, those with the fewest changes first."""
    start, found = time.perf_counter(), list[Near]()
    devices = list(planned.program.layout.mesh.devices.flat)
    for tries, one in enumerate(_hopeful(planned)):
        if len(found) == COUNT or tries == TRIES or time.perf_counter() - start > SECONDS:
            break
        try:
            tried = plan_program(program(one.cfg, devices))
        except UserError:  # no program comes of it
            continue
        tried = dataclasses.replace(tried, target=planned.target, reserve_gib=planned.reserve_gib)
        if tried.fits:
            found.append(Near(one.overrides, tried))
    return found


def _hopeful(planned: Plan) -> list[Candidate]:
    """Of each set of keys that changes, the fastest that should fit; then the next fastest of each."""
    given, *others = candidates(planned.program.cfg, planned.target, allowed(BY_DEFAULT))
    off = planned.compiled_step.total / given.estimate.total  # the estimate is wrong alike for its neighbours
    ranks: dict[frozenset[str], int] = {}
    ranked: list[tuple[int, int, float, Candidate]] = []
    for one in sorted(others, key=lambda one: one.estimate.seconds or 0.0):
        if off * one.estimate.total <= planned.limit and one.estimate.host <= planned.target.host_memory:
            keys = frozenset("mesh" if key.startswith("mesh.") else key for key in one.changes)
            ranks[keys] = ranks.get(keys, -1) + 1
            ranked.append((ranks[keys], len(keys), one.estimate.seconds or 0.0, one))
    return [one for *_, one in sorted(ranked, key=lambda rank: rank[:3])]
