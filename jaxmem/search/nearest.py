"""For a run that does not fit, the nearest configs that fit; for a run that fits, settings that make it much slower.

Candidates are estimated as in a search, but only a few configs are compiled: for each set of settings that could
change, smallest sets first, the fastest config that is estimated to fit; then configs of other methods of training.
"""

import itertools
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from jaxmem.config import Config
from jaxmem.config.methods import METHODS, run_config
from jaxmem.errors import UserError
from jaxmem.planning import Plan, format_bytes
from jaxmem.planning.units import format_command
from jaxmem.search.candidates import Candidate, candidates, difference, overrides
from jaxmem.search.compilers import CompilerPool, RefusedError
from jaxmem.search.knobs import DEFAULT_ALLOW, KERNELS, MEMORY_KNOBS, allowed

MAX_SUGGESTIONS = 3  # configs to suggest
MAX_COMPILES = 6  # configs to compile at most
MAX_SECONDS = 60.0  # no config is compiled after this time
SLOW_RATIO = 1.5  # a setting is reported if a step takes more than this multiple of its time with another value


@dataclass(frozen=True)
class Nearest:
    """A config that fits."""

    overrides: list[str]
    method: str | None  # another method of training; None: the method of the config
    of_method: list[str]  # overrides in addition to --method
    total: int  # compiled bytes per device

    def __str__(self) -> str:
        method = f" (another method: {self.method})" if self.method else ""
        return f"{shlex.join(self.overrides)}    {format_bytes(self.total)}{method}"

    def command(self, plan: Sequence[str], method: str | None, width: int | None) -> str:
        """The command that plans this config. `plan`: the command of the plan that does not fit; `method`: its method
        if it was set."""
        words = [*plan, "--method", self.method, *self.of_method] if self.method else [*plan, *self.overrides]
        if method and not self.method:
            words += ["--method", method]
        changes = f"another method: {self.method}" if self.method else shlex.join(self.overrides)
        return f"{format_bytes(self.total)}, {changes}\n{format_command(words, width)}"


def suggestions(plan: Plan, text: Callable[[Nearest], str] = "  {}".format) -> str:
    """The nearest configs that fit, each as a text; by default its overrides and bytes."""
    near = nearest_fitting(plan)
    if not near:
        return "no similar config fits; `jaxmem fit` searches among more configs"
    return "\n".join(["nearest configs that fit (compiled):", *map(text, near)])


def nearest_fitting(plan: Plan) -> list[Nearest]:
    """Up to MAX_SUGGESTIONS configs: configs with the fewest changes first, other methods of training last."""
    start, found = time.perf_counter(), list[Nearest]()
    promising = itertools.islice(_fitting_by_estimate(plan), MAX_COMPILES)
    with CompilerPool(plan.target, plan.reserve_gib) as compilers:

        def compiled(cfg: Config) -> tuple[int, int]:
            """Bytes per device in the largest phase, and bytes of host memory per device."""
            cost = compilers.step(cfg)
            return max(cost.total, *compilers.phases(cfg).values()), cost.host

        while len(found) < MAX_SUGGESTIONS and time.perf_counter() - start < MAX_SECONDS:
            chosen = list(itertools.islice(promising, compilers.processes))
            answers = dict(compilers.each(compiled, [one.cfg for one, _ in chosen]))
            for one, method in chosen:
                answer = answers[one.cfg]
                if not isinstance(answer, RefusedError) and _fits(plan, *answer):
                    changes = overrides(difference(plan.program.cfg, one.cfg))
                    found.append(Nearest(changes, method, one.overrides, answer[0]))
            if not chosen:
                break
    return found[:MAX_SUGGESTIONS]


def slower_settings(plan: Plan) -> list[str]:
    """A line for each setting for which another value fits and makes a step more than SLOW_RATIO times as fast."""
    if not plan.fits or plan.target.gpu is None:
        return []
    found = []
    for knob in allowed(DEFAULT_ALLOW):
        given, *others = candidates(plan.program.cfg, plan.target, [knob])
        ratio = plan.compiled_step.total / given.estimate.total
        fitting = [one for one in others if _fits(plan, ratio * one.estimate.total, one.estimate.host)]
        fastest = min(fitting, key=_seconds, default=given)
        if (slower := _seconds(given) / _seconds(fastest)) > SLOW_RATIO:
            own = " ".join(overrides(difference(fastest.cfg, given.cfg)))
            found.append(f"{own} makes a step {slower:.1f} times as long as {' '.join(fastest.overrides)} (estimated)")
    return found


def _fitting_by_estimate(plan: Plan) -> Iterator[tuple[Candidate, str | None]]:
    """For each set of keys that may change, the fastest config that is estimated to fit; then the second fastest for
    each set, and so on; at the end the fastest config of each other method, with the name of the method."""
    cfg, knobs = plan.program.cfg, [knob for knob in allowed(DEFAULT_ALLOW) if knob.allow != KERNELS]
    given, *others = candidates(cfg, plan.target, knobs)
    ratio = plan.compiled_step.total / given.estimate.total  # estimates of similar configs have similar errors
    ranks: dict[frozenset[str], int] = {}
    ranked: list[tuple[int, int, float, Candidate]] = []
    for one in sorted(others, key=_seconds):
        if _fits(plan, ratio * one.estimate.total, one.estimate.host):
            keys = frozenset("mesh" if key.startswith("mesh.") else key for key in one.changes)
            ranks[keys] = ranks.get(keys, -1) + 1
            ranked.append((ranks[keys], len(keys), _seconds(one), one))
    yield from ((one, None) for *_, one in sorted(ranked, key=lambda rank: rank[:3]))
    for name in METHODS:
        try:
            of_method = candidates(run_config(cfg, method=name), plan.target, MEMORY_KNOBS)
        except UserError:  # the method does not support this config
            continue
        fitting = [one for one in of_method if _fits(plan, one.estimate.total, one.estimate.host)]
        if fitting and run_config(cfg, method=name) != cfg:
            yield min(fitting, key=_seconds), name


def _fits(plan: Plan, total: float, host: int) -> bool:
    return 0 < total <= plan.limit and host <= plan.target.host_memory


def _seconds(one: Candidate) -> float:
    return one.estimate.seconds or float("inf")
