"""`fit`: the fastest configs that fit a target, or the methods of training that fit it."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Unpack

from jaxmem.config import Config
from jaxmem.config.methods import (
    METHODS,
    RunOptions,
    RunSource,
    check_method,
    is_model,
    run_config,
    setting_of_method,
    without_replaced,
)
from jaxmem.errors import UserError, as_yaml
from jaxmem.planning.accuracy import published_range
from jaxmem.planning.result import PlanWarning
from jaxmem.planning.targets import Target
from jaxmem.planning.units import format_bytes, format_seconds
from jaxmem.search.candidates import Candidate
from jaxmem.search.comparison import Comparison, command_line, compare
from jaxmem.search.compilers import CompilerPool, compile_target
from jaxmem.search.fastest import Progress, Search, SearchResult, Trials, target_json
from jaxmem.search.knobs import DEFAULT_ALLOW, allowed
from jaxmem.typing import JsonDict

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.table import Table

SHOWN_KINDS = 2  # if a config does not fit, its reason names this number of largest kinds of memory (weights, ...)
OTHER_ROWS = 8  # number of rows for configs that are not on the front
DEFAULT_COMPILES = 12  # steps to compile at most, by default


@dataclass(frozen=True)
class Fit(SearchResult):
    given: Config
    target: Target
    trials: Trials
    allow: tuple[str, ...]
    seconds: float
    other_methods: Comparison | None = None  # if nothing fits: other methods of training

    def __repr__(self) -> str:
        best = "nothing fits"
        if self.best:
            seconds = format_seconds(self.best.seconds)
            size = format_bytes(self.best.total)
            best = f"{size} of {format_bytes(self.trials.limit)}, {seconds} per step: {self.best.description}"
        return f"Fit({self.given.name} on {self.target.name}: {best})"

    @cached_property
    def front(self) -> list[Candidate]:
        """The Pareto front, fastest first; each config needs less memory than the one before. All phases of a run are
        compiled for these configs."""
        return self.trials.front()

    @property
    def best(self) -> Candidate | None:
        return self.front[0] if self.front else None

    @cached_property
    def slow_settings(self) -> list[PlanWarning]:
        """Settings outside the search that make a step of the fastest config much longer."""
        return self.best.slow_settings(self.target, self.trials.limit) if self.best else []

    @property
    def smallest(self) -> Candidate:
        """The compiled config that needs the least memory."""
        return min(self.trials.compiled, key=lambda candidate: candidate.total)

    @cached_property
    def ranked(self) -> list[Candidate]:
        """Candidates that fit, fastest first; then the others, by memory. In both groups, compiled candidates are
        first."""

        def order(candidate: Candidate) -> tuple[bool, bool, float]:
            fits = self.trials.fits(candidate)
            return not fits, candidate.cost is None, candidate.seconds if fits else candidate.total

        return sorted(self.trials.all, key=order)

    def reason(self, candidate: Candidate) -> str:
        """The reason why a candidate is not the best."""
        if candidate is self.best:
            return "fastest that fits"
        if candidate.refusal:
            return candidate.refusal
        about = "" if candidate.cost else "about "
        if not self.trials.fits(candidate):
            kinds = sorted(candidate.kinds.items(), key=lambda kind: -kind[1])[:SHOWN_KINDS]
            largest = ", ".join(f"{name} {format_bytes(size)}" for name, size in kinds)
            return self.trials.shortage(candidate) + (f": {largest}" if candidate.total > self.trials.limit else "")
        if candidate in self.front:
            return f"fastest within {format_bytes(candidate.total)}"
        if self.best is None:
            return f"needs about {format_bytes(candidate.total)}; not compiled"
        return f"{about}{candidate.seconds / self.best.seconds:.2f} x the time of the fastest"

    def as_json(self) -> JsonDict:
        return {
            "target": target_json(self.target, self.trials.limit),
            "allow": list(self.allow),
            "considered": len(self.trials.all),
            "compiled": len(self.trials.compiled),
            "candidates": [self._json(candidate) for candidate in self.ranked],
            "front": [self._json(candidate) for candidate in self.front],
            "best": self._json(self.best) if self.best else None,
            "slow_settings": [slow.text for slow in self.slow_settings],
            "smallest": self._json(self.smallest) if self.trials.compiled else None,
            "others": self.other_methods.as_json() if self.other_methods else None,
            "seconds": self.seconds,
        }

    def _json(self, candidate: Candidate) -> JsonDict:
        about = {"compiled": candidate.cost is not None, "why": self.reason(candidate)}
        return candidate.as_json(fits=self.trials.fits(candidate)) | about

    def __rich_console__(self, _console: Console, _options: ConsoleOptions) -> Iterator[RenderableType]:
        from rich.text import Text

        compiled = self.trials.compiled
        counts = f"{len(self.trials.all):,} configs considered, {len(compiled)} compiled, in {self.seconds:.0f} s"
        yield Text(f"{self.given.name} on {self.target.name}", style="bold")
        yield Text(f"{counts}; {format_bytes(self.trials.limit)} per device")
        if self.best:
            yield self._front_table()
            yield Text(f"fastest: {self.best.description}", style="green")
            for slow in self.slow_settings:
                yield Text(f"{slow.kind}: {slow.text}; try {slow.cure}")
        else:
            yield Text("nothing fits", style="red")
            yield Text(f"smallest found: {format_bytes(self.smallest.total)} with {self.smallest.description}")
        if self.other_methods:
            yield self.other_methods
            return
        others = [candidate for candidate in self.ranked if candidate.cost and candidate not in self.front]
        if others:
            yield Text("Other compiled configs:")
        for candidate in others[:OTHER_ROWS]:
            yield Text(f"  {candidate.description}: {self.reason(candidate)}", style="dim")
        if compared := published_range(self.target):
            yield Text(f"times are estimates: {compared} than planned")
        if self.best:
            yield Text("next: add --write run.yaml to this command, then jaxmem train run.yaml")

    def _front_table(self) -> Table:
        from rich.table import Table
        from rich.text import Text

        table = Table(title="Fastest first; each further row needs less memory", title_justify="left")
        table.add_column("step", justify="right", no_wrap=True)
        table.add_column("memory", justify="right", no_wrap=True)
        table.add_column("changes")
        for candidate in self.front:  # Text, since brackets in a description are not markup
            description = Text(candidate.description)
            table.add_row(format_seconds(candidate.seconds), format_bytes(candidate.total), description)
        return table


def fit(
    source: RunSource,
    target: str | None = None,
    *,
    allow: Sequence[str] | None = None,
    reserve_gib: float | None = None,
    compiles: int | None = None,
    progress: Progress = lambda _: None,
    **options: Unpack[RunOptions],
) -> Fit | Comparison:
    """Search for the configs that fit a target, fastest first.

    Args:
        source: A config, a preset or a Hugging Face directory.
        target: Devices such as `h100-80gb:8`; by default those of this machine.
        allow: Words for the settings that may change (`knobs.KNOBS` lists the settings of each word), by default all;
            only for a single method.
        reserve_gib: Memory of each GPU outside the compiled program, by default `jaxmem.machine.gpus.reserved`.
        compiles: The largest number of steps to compile, by default 12; only for a single method.
        progress: Called with lines of text.
        **options: `method`: one method of training, or several to compare, separated by commas; without it, all methods
            are compared if the source is a model. `sequence_length`, `batch`, `overrides`.
    """
    aim = compile_target(target)
    method = options.get("method")
    methods = [check_method(name.strip()) for name in method.split(",")] if method else []
    compares = len(methods) > 1 or (not methods and is_model(source))
    for name, value in (("allow", allow), ("compiles", compiles)):
        if compares and value is not None:
            raise UserError(f"{name}={as_yaml(value)} supports a single method only; use method=NAME")
    if compares:
        options["method"] = None
    overrides = options.get("overrides", ())
    if compares and (override := setting_of_method(methods or METHODS, overrides)):
        # Each row would have the name of its method, and the figures of this setting.
        raise UserError(f"{override} supports a single method only; choose the method too, e.g. --method lora")
    config = functools.partial(run_config, source, devices=aim.count, **options)
    command = command_line(source, {**options, "reserve": reserve_gib})
    with CompilerPool(aim, reserve_gib) as compilers:
        if compares:
            return compare(config, command, compilers, progress, methods=methods)
        cfg = config()
        words = DEFAULT_ALLOW if allow is None else allow
        most = DEFAULT_COMPILES if compiles is None else compiles
        result = search(cfg, words, compilers, compiles=most, progress=progress)
        if result.best:
            return result
        progress("nothing fits; comparing other methods of training")

        def other(method: str | None = None) -> Config:
            """The config, or that of another method, whose settings replace those that the user gave."""
            return config(method=method, overrides=without_replaced(method, overrides)) if method else cfg

        return dataclasses.replace(result, other_methods=compare(other, command, compilers, progress, current=cfg))


def search(
    cfg: Config,
    allow: Sequence[str],
    compilers: CompilerPool,
    *,
    compiles: int = DEFAULT_COMPILES,
    progress: Progress = lambda _: None,
) -> Fit:
    """Searches among all configs that differ from one config in the settings that `allow` permits.

    Args:
        cfg: The config.
        allow: Words for the settings that may change.
        compilers: The processes that compile.
        compiles: The largest number of steps to compile.
        progress: Called with lines of text.
    """
    start = time.perf_counter()
    target = compilers.target
    if compiles < 1:
        raise UserError(f"compiles={compiles} must be at least 1")
    searched = Search(cfg, allowed(allow), compilers, progress)
    progress(f"{len(searched.trials.all):,} configs estimated; compiling at most {compiles}")
    searched.compile(compiles)
    if not searched.trials.compiled:
        reasons = [trial.refusal for trial in searched.trials.all if trial.refusal]
        raise UserError(f"{cfg.name} on {target.name}: all {len(reasons)} configs failed to compile: {reasons[0]}")
    return Fit(cfg, target, searched.trials, tuple(allow), time.perf_counter() - start)
