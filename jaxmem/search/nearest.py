"""The nearest configs that fit, for a run that does not fit on its devices; each is compiled before it is suggested.

The candidates and estimates are those of a whole search, but only a few are compiled: for each set of settings that
could change, fewest first, the fastest config that should fit.
"""

from __future__ import annotations

import dataclasses
import time

from jaxmem.errors import UserError
from jaxmem.planning import Plan, format_bytes, plan_program
from jaxmem.search.candidates import Candidate, candidates
from jaxmem.search.knobs import DEFAULT_ALLOW, allowed
from jaxmem.step import program

COUNT = 3  # configs to suggest
COMPILES = 6  # at most
SECONDS = 60.0  # after which no other one is compiled


def suggestions(plan: Plan) -> str:
    """A line for each, with its overrides and bytes."""
    near = nearest_fitting(plan)
    if not near:
        return "no config near it fits; `jaxmem fit` searches further"
    lines = (f"  {' '.join(overrides)}    {format_bytes(other.compiled_step.total)}" for overrides, other in near)
    return "\n".join(["nearest configs that fit (compiled):", *lines])


def nearest_fitting(plan: Plan) -> list[tuple[list[str], Plan]]:
    """Up to COUNT configs as overrides, with their plans; those with the fewest changes first."""
    start, found = time.perf_counter(), list[tuple[list[str], Plan]]()
    devices = list(plan.program.layout.mesh.devices.flat)
    for tries, one in enumerate(_fitting_by_estimate(plan)):
        if len(found) == COUNT or tries == COMPILES or time.perf_counter() - start > SECONDS:
            break
        try:
            other = plan_program(program(one.cfg, devices))
        except UserError:  # it has no program
            continue
        other = dataclasses.replace(other, target=plan.target, reserve_gib=plan.reserve_gib)
        if other.fits:
            found.append((one.overrides, other))
    return found


def _fitting_by_estimate(plan: Plan) -> list[Candidate]:
    """For each set of keys that changes, the fastest that should fit; then the next fastest of each."""
    given, *others = candidates(plan.program.cfg, plan.target, allowed(DEFAULT_ALLOW))
    ratio = plan.compiled_step.total / given.estimate.total  # neighbours share the error of the estimate
    ranks: dict[frozenset[str], int] = {}
    ranked: list[tuple[int, int, float, Candidate]] = []
    for one in sorted(others, key=lambda one: one.estimate.seconds or 0.0):
        if ratio * one.estimate.total <= plan.limit and one.estimate.host <= plan.target.host_memory:
            keys = frozenset("mesh" if key.startswith("mesh.") else key for key in one.changes)
            ranks[keys] = ranks.get(keys, -1) + 1
            ranked.append((ranks[keys], len(keys), one.estimate.seconds or 0.0, one))
    return [one for *_, one in sorted(ranked, key=lambda rank: rank[:3])]
