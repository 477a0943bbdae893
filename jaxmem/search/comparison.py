"""The methods of training a model on a target: memory, time and command of each, and whether it fits.

For each method, the fastest config that fits is searched among settings that change only memory and time. All methods
are estimated first; then configs of each method that may fit are compiled until one fits, at most three. Recompute is
tried before offloading, whose copies are exposed more often than an estimate can tell. An offloading config is compiled
only if no other fits, or if it is estimated to be faster.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxmem.config import Config, Decoder
from jaxmem.config.methods import METHODS, RunSource, without_replaced
from jaxmem.errors import one_line
from jaxmem.machine.gpus import GIB
from jaxmem.planning.accuracy import published_range
from jaxmem.planning.targets import Target
from jaxmem.planning.units import format_bytes, format_command, format_seconds, last_overrides
from jaxmem.search.candidates import Candidate
from jaxmem.search.compilers import CompilerPool
from jaxmem.search.fastest import ESTIMATE_ERROR, Progress, Search, SearchResult, Trials, target_json
from jaxmem.search.knobs import MEMORY_KNOBS
from jaxmem.typing import JsonDict, JsonView

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType

MAX_COMPILES = 3  # largest number of compiled configs per method, without offloading and with it
MIN_SPEEDUP = 1.05  # by which an offloading config must be estimated to be faster than a compiled one without
OFFLOAD = "memory.offload"


class MethodSearch:
    """A search of the fastest config of a method: configs that do not offload first, then those that do."""

    def __init__(self, name: str, cfg: Config, compilers: CompilerPool, progress: Progress) -> None:
        self._name = name
        self._search = Search(cfg, MEMORY_KNOBS, compilers, lambda line: progress(f"{name}: {line}"))
        self.trials = self._search.trials
        self._offloading = [candidate for candidate in self.trials.all if OFFLOAD in candidate.changes]
        self._on_device = [candidate for candidate in self.trials.all if OFFLOAD not in candidate.changes]

    def compile(self) -> None:
        """Compiles configs until one fits, and an offloading one that may be faster."""
        self._compile(self._on_device, MAX_COMPILES)
        if not (front := self.trials.front()):
            self._compile(self._offloading, MAX_COMPILES)
            return
        fitting = [candidate.seconds for candidate in self._offloading if self.trials.fits(candidate)]
        if min(fitting, default=math.inf) * MIN_SPEEDUP < front[0].seconds:
            self._compile(self._offloading, 1)

    def result(self) -> MethodResult:
        return MethodResult.of(self._name, self.trials)

    def _compile(self, among: Sequence[Candidate], most: int) -> None:
        """Compiles at most `most` of these candidates, until one of them fits, if one may fit."""
        if any(self.trials.fits(candidate, ESTIMATE_ERROR) for candidate in among):
            self._search.compile_until_one_fits(most, among)


@dataclass(frozen=True)
class MethodResult:
    """The config that represents a method: the fastest compiled config that fits; if none fits, the smallest compiled
    one; if none is compiled, by the estimates the fastest that may fit, or the smallest."""

    name: str
    candidate: Candidate | None  # None: the method does not support this config
    fits: bool = False
    reason: str = ""  # why it does not fit

    @classmethod
    def of(cls, name: str, trials: Trials) -> MethodResult:
        if front := trials.front():
            return cls(name, front[0], fits=True)
        known = [candidate for candidate in trials.all if candidate.refusal is None]
        if not known:
            return cls(name, None, reason=trials.all[0].refusal or "")
        may_fit = trials.front((candidate for candidate in known if candidate.is_pending), ESTIMATE_ERROR)
        if not (compiled := [candidate for candidate in known if candidate.cost]):
            shown = may_fit[0] if may_fit else min(known, key=lambda candidate: candidate.total)
            return cls(name, shown, reason=trials.shortage(shown))
        shown = min(compiled, key=lambda candidate: candidate.total)
        advice = f"; {len(compiled)} configs were compiled; jaxmem fit --method {name} compiles more" if may_fit else ""
        return cls(name, shown, reason=trials.shortage(shown) + advice)

    @property
    def cfg(self) -> Config:
        assert self.candidate
        return self.candidate.cfg

    def __str__(self) -> str:
        """One line with bytes and seconds, or with the reason why it has no result.

        >>> str(MethodResult("lora", None, reason="no weights"))
        'lora: no weights'
        """
        if self.candidate is None:
            return f"{self.name}: {self.reason}"
        about = "" if self.candidate.cost else "about "
        size = format_bytes(self.candidate.total)
        seconds = format_seconds(self.candidate.seconds)
        return f"{self.name}: {about}{size}, {seconds} per step"


@dataclass(frozen=True)
class Comparison(SearchResult):
    given: Config
    target: Target
    limit: int  # bytes per device
    results: tuple[MethodResult, ...]
    command: tuple[str, ...]  # arguments of `jaxmem plan`: the model or config, and the options that were set
    seconds: float
    replaces: bool = False  # whether the settings of a method replace those of `command`

    @property
    def fitting(self) -> list[MethodResult]:
        """The methods that fit, in the order of METHODS: training of all parameters in float32 is first."""
        return [result for result in self.results if result.fits]

    @property
    def best(self) -> MethodResult | None:
        return next(iter(self.fitting), None)

    def __repr__(self) -> str:
        fitting = ", ".join(result.name for result in self.fitting) or "no methods"
        return f"Comparison({self.given.name} on {self.target.name}: {fitting} fit)"

    def plan_command(self, result: MethodResult) -> str:
        """The command that plans the config of a method."""
        assert result.candidate
        given = without_replaced(result.name, self.command) if self.replaces else self.command
        words = (*given, "--method", result.name, *result.candidate.overrides, "--target", self.target.name)
        return format_command(["jaxmem", "plan", *last_overrides(words)])

    def as_json(self) -> JsonDict:
        return {
            "target": target_json(self.target, self.limit),
            "methods": [self._json(result) for result in self.results],
            "best": self.best.name if self.best else None,
            "seconds": self.seconds,
        }

    def tokens_per_second(self, candidate: Candidate) -> float | None:
        """Tokens per second of all devices, from the estimated time; None if it is unknown, or the model has no
        tokens."""
        return candidate.rate if candidate.seconds and isinstance(self.given.model, Decoder) else None

    def _json(self, result: MethodResult) -> JsonDict:
        method = METHODS[result.name]
        entry: JsonDict = {"name": result.name, "summary": method.summary, "mathematics": method.mathematics}
        if result.candidate is None:
            return entry | {"fits": False, "error": result.reason}
        entry |= {} if result.fits else {"why": result.reason}
        entry |= {"compiled": result.candidate.cost is not None, "command": self.plan_command(result).strip()}
        entry["slow_settings"] = [slow.text for slow in result.candidate.slow_settings(self.target, self.limit)]
        entry["tokens_per_second"] = self.tokens_per_second(result.candidate)
        return entry | result.candidate.as_json(fits=result.fits)

    def __rich_console__(self, _console: Console, _options: ConsoleOptions) -> Iterator[RenderableType]:
        from rich.box import SIMPLE_HEAD
        from rich.table import Table
        from rich.text import Text

        cfg = self.given
        length = f"x {cfg.data.sequence_length:,} tokens" if isinstance(cfg.model, Decoder) else "examples"
        size = f"{cfg.batch.global_size} {length} per step"
        head = f"{cfg.name} on {self.target.name}: {format_bytes(self.limit)} per device, {size}"
        yield Text(head, style="bold")
        table = Table(box=SIMPLE_HEAD)
        table.add_column("method", no_wrap=True)
        numbers = ("GiB", "step", "tok/s")
        for column in (*numbers, "fits"):
            table.add_column(column, justify="right", no_wrap=True)
        table.add_column("settings, or reason")
        for result in self.results:
            cells = dict.fromkeys(numbers, "")
            if result.candidate:
                about = "" if result.candidate.cost else "~"
                speed = self.tokens_per_second(result.candidate)
                cells["GiB"] = f"{about}{result.candidate.total / GIB:.1f}"
                cells["step"] = about + format_seconds(result.candidate.seconds)
                if speed:
                    cells["tok/s"] = f"{about}{speed:,.0f}"
            why = result.candidate.description if result.fits and result.candidate else result.reason
            row = (result.name, *cells.values(), "yes" if result.fits else "no", Text(why))
            table.add_row(*row, style="green" if result.fits else "")
        yield table
        for method_result in self.results:
            if method_result.fits:
                method = METHODS[method_result.name]
                yield Text.assemble((method_result.name, "bold"), f": {method.summary}; {method.mathematics}")
                yield Text(self.plan_command(method_result), no_wrap=True, overflow="ignore")
                candidate = method_result.candidate
                for slow in candidate.slow_settings(self.target, self.limit) if candidate else ():
                    yield Text(f"{slow.kind}: {slow.text}; try {slow.cure}")
        compared = published_range(self.target)
        times = f"All times are estimates ({compared} than planned)" if compared else "All times are estimates"
        yield Text(f"~ not compiled. {times}. The comparison took {self.seconds:.0f} s")
        if self.target.gpu and self.target.withheld is None:
            host = format_bytes(self.target.host_memory)
            yield Text(f"Host memory is assumed: {host} per GPU. To change it, see --target FILE in docs/plan.md")
        if self.best:
            yield Text("next: add --write run.yaml to one of these commands, then jaxmem train run.yaml")
        else:
            yield Text("no method fits: use a shorter data.sequence_length, or more or larger GPUs")


def command_line(source: RunSource, options: JsonView) -> tuple[str, ...]:
    """The arguments of `jaxmem plan` that name a model or config, and the options that are set."""
    named = source.name if isinstance(source, Config) else source.get("name") if isinstance(source, Mapping) else None
    words = [str(source) if named is None else f"{named}.yaml"]
    for key in ("sequence_length", "batch", "reserve"):
        if options.get(key) is not None:
            words += [f"--{key.replace('_', '-')}", str(options[key])]
    return (*words, *options.get("overrides", ()))


def compare(
    config: Callable[..., Config],
    command: tuple[str, ...],
    compilers: CompilerPool,
    progress: Progress,
    *,
    methods: Iterable[str] = (),
    current: Config | None = None,
) -> Comparison:
    """Compares methods of training.

    Args:
        config: `config(method=NAME)` returns the config of a method.
        command: The arguments of `jaxmem plan` that name the model or config.
        compilers: The processes that compile.
        progress: Called with lines of text.
        methods: Names of METHODS, by default all.
        current: A config, whose methods are replaced; a method with an equal config is left out.
    """
    start = time.perf_counter()
    outcomes: list[MethodSearch | MethodResult] = []
    for name in dict.fromkeys(methods or METHODS):  # each once
        try:
            cfg = config(method=name)
            if cfg == current:
                continue
            search = MethodSearch(name, cfg, compilers, progress)
            progress(str(search.result()))
            outcomes.append(search)
        except Exception as error:  # noqa: BLE001 - a method that fails must not end the comparison
            failure = MethodResult(name, None, reason=one_line(error))
            progress(str(failure))
            outcomes.append(failure)
    searches = [outcome for outcome in outcomes if isinstance(outcome, MethodSearch)]
    with ThreadPoolExecutor(compilers.processes) as pool:
        list(pool.map(MethodSearch.compile, searches))
    results = tuple(outcome.result() if isinstance(outcome, MethodSearch) else outcome for outcome in outcomes)
    limit = searches[0].trials.limit if searches else 0
    seconds = time.perf_counter() - start
    return Comparison(config(), compilers.target, limit, results, command, seconds, replaces=current is not None)
