"""For a run that does not fit, the nearest configs that fit.

Candidates are estimated as in a search, but only a few configs are compiled: for each set of settings that could
change, smallest sets first, the fastest config that is estimated to fit; then configs of other methods of training.
"""

import dataclasses
import itertools
import shlex
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from jaxmem.config import Config
from jaxmem.config.devices import resolve
from jaxmem.config.methods import METHODS, without_replaced
from jaxmem.errors import UserError
from jaxmem.planning.result import Plan
from jaxmem.planning.targets import Target
from jaxmem.planning.units import format_bytes, format_command, format_seconds, last_overrides
from jaxmem.search.candidates import Candidate, Space, difference, overrides
from jaxmem.search.compilers import CompilerPool, RefusedError
from jaxmem.search.knobs import KNOBS, MEMORY_KNOBS

MAX_SUGGESTIONS = 3  # configs to suggest
MAX_COMPILES = 6  # configs to compile at most
MAX_SECONDS = 60.0  # duration of a search at most


@dataclass(frozen=True)
class Nearest:
    """A config that fits."""

    overrides: list[str]  # what differs from the config, or from that of the other method
    method: str | None  # another method of training; None: the method of the config
    total: float  # compiled bytes per device
    seconds: float | None  # estimated seconds of a step; None for CPUs

    def __str__(self) -> str:
        """One line with the bytes, the seconds and the settings that differ.

        >>> str(Nearest(["memory.remat=full"], None, 2**30, 0.5))
        '1.0 GiB, 500 ms per step: memory.remat=full'
        """
        step = "" if self.seconds is None else f", {format_seconds(self.seconds)} per step"
        changes = f"another method, {self.method}" if self.method else shlex.join(self.overrides)
        return f"{format_bytes(self.total)}{step}: {changes}"

    def command(self, plan: Sequence[str], method: str | None) -> str:
        """The command that plans this config. `plan`: the command of the plan that does not fit; `method`: its method
        if it was set."""
        words = without_replaced(self.method, plan) if self.method else plan
        name = self.method or method
        return format_command(last_overrides([*words, *(["--method", name] if name else []), *self.overrides]))


class Limit:
    """The time that a search has: `is_over` after `seconds`."""

    def __init__(self, seconds: float = MAX_SECONDS) -> None:
        self._end = time.perf_counter() + seconds

    @property
    def left(self) -> float:
        return max(0.0, self._end - time.perf_counter())

    def is_over(self) -> bool:
        return self.left == 0


def nearest_fitting(plan: Plan, config: Callable[[str | None], Config], limit: Limit) -> Iterator[Nearest]:
    """Up to MAX_SUGGESTIONS configs, each as soon as it is compiled: configs with the fewest changes first, other
    methods of training last. At the limit the search ends, also between two estimates and while a config is being
    compiled. `config(method)`: the config of the plan as it was written, or that of another method."""
    count = 0
    promising = itertools.islice(_fitting_by_estimate(plan, config, limit), MAX_COMPILES)
    with CompilerPool(_other_process(plan.target), plan.reserve_gib) as compilers:
        timer = threading.Timer(limit.left, compilers.kill)
        timer.daemon = True
        timer.start()
        try:
            while not limit.is_over():
                chosen = {
                    candidate.cfg: (candidate, method)
                    for candidate, method in itertools.islice(promising, compilers.processes)
                }
                for cfg, answer in compilers.ask_all(compilers.step_and_phases, chosen):
                    if isinstance(answer, RefusedError):
                        continue
                    candidate, method = chosen[cfg]
                    candidate.cost, candidate.phases = answer
                    if count < MAX_SUGGESTIONS and _fits(plan, candidate):
                        given, _ = resolve(config(method), plan.target.count)  # its memory.remat may be auto
                        seconds = candidate.seconds if plan.target.gpu else None
                        yield Nearest(overrides(difference(given, cfg)), method, candidate.total, seconds)
                        count += 1
                if not chosen or count == MAX_SUGGESTIONS:
                    break
        finally:
            timer.cancel()


def _other_process(target: Target) -> Target:
    """The target without jax's devices, so that other processes compile and can be ended. A GPU that is not in the
    table of GPUs can only be compiled for in this process."""
    if target.here is None or (target.gpu is None and not target.is_cpu):
        return target
    return dataclasses.replace(target, here=None)


def _fitting_by_estimate(
    plan: Plan, config: Callable[[str | None], Config], limit: Limit
) -> Iterator[tuple[Candidate, str | None]]:
    """For each set of keys that may change, the fastest config that is estimated to fit; then the second fastest for
    each set, and so on; at the end the fastest config of each other method, with the name of the method. Changes of one
    key are estimated first, then changes of two, then all, since there may be thousands."""
    cfg = plan.program.cfg
    seen = set[Config]()
    for count in (1, 2, len(KNOBS)):
        for group in itertools.combinations(KNOBS, count):
            if limit.is_over():
                return
            ranked = _ranked(plan, Space(cfg, plan.target, group, limit.is_over).start())
            for rank, candidate in ranked:
                if candidate.cfg not in seen and (rank == 0 or count == len(KNOBS)):
                    seen.add(candidate.cfg)
                    yield candidate, None
    for name in METHODS:
        if limit.is_over():
            return
        try:
            if (of_method := config(name)) == config(None):
                continue
            of_method = of_method.replace(memory={"remat": cfg.memory.remat})  # what the plan chose for auto
            candidates = Space(of_method, plan.target, MEMORY_KNOBS, limit.is_over).start()
        except UserError:  # the method does not support this config
            continue
        fitting = [candidate for candidate in candidates if _fits(plan, candidate)]
        if fitting:
            yield min(fitting, key=_seconds), name


def _ranked(plan: Plan, group: Sequence[Candidate]) -> list[tuple[int, Candidate]]:
    """The candidates that are estimated to fit, each with its rank among those that change the same keys: by rank, then
    by number of keys, then by seconds. The first candidate is the given config."""
    given, *others = group
    ratio = plan.compiled_step.total / given.estimate.total  # estimates of similar configs have similar errors
    ranks: dict[frozenset[str], int] = {}
    ranked: list[tuple[int, int, float, Candidate]] = []
    for candidate in sorted(others, key=_seconds):
        candidate.bytes_ratio = ratio
        if _fits(plan, candidate):
            keys = frozenset("mesh" if key.startswith("mesh.") else key for key in candidate.changes)
            ranks[keys] = ranks.get(keys, -1) + 1
            ranked.append((ranks[keys], len(keys), _seconds(candidate), candidate))
    return [(rank, candidate) for rank, *_, candidate in sorted(ranked, key=lambda item: item[:3])]


def _fits(plan: Plan, candidate: Candidate) -> bool:
    return 0 < candidate.total <= plan.limit and candidate.host_bytes <= plan.target.host_memory


def _seconds(candidate: Candidate) -> float:
    return candidate.estimate.seconds or float("inf")
