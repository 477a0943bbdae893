"""The result of a search for the fastest config: the front, and for other configs the reason why they are not on it."""

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from jaxmem.config import Config
from jaxmem.machine.gpus import GIB
from jaxmem.planning import Target, format_bytes
from jaxmem.planning.units import format_seconds
from jaxmem.search.candidates import difference, overrides
from jaxmem.search.comparison import Comparison
from jaxmem.search.trials import SLOWEST, Trial, Trials, save_best, target_json

ONE_SETTING = ("mesh.", "optimizer.", "rules.", "adapter.")  # sections that count as one setting
KINDS = 2  # number of kinds of bytes that a reason names
OTHERS = 8  # rows of the table for configs that are not on the front


@dataclass(frozen=True)
class Fit:
    given: Config
    target: Target
    trials: Trials
    allow: tuple[str, ...]
    seconds: float
    others: Comparison | None = None  # if nothing fits: other methods of training

    def __repr__(self) -> str:
        best = "nothing fits"
        if self.best:
            seconds, size = format_seconds(self.best.seconds), format_bytes(self.best.total)
            best = f"{size} of {format_bytes(self.trials.limit)}, {seconds} per step: {self.best.overrides}"
        return f"Fit({self.given.name} on {self.target.name}: {best})"

    @cached_property
    def front(self) -> list[Trial]:
        """The Pareto front: fastest first, each next one in less memory. Every phase of a run is compiled for them."""
        return self.trials.front()

    @property
    def best(self) -> Trial | None:
        return self.front[0] if self.front else None

    @property
    def smallest(self) -> Trial:
        """The compiled config that needs the least memory."""
        return min(self.trials.compiled, key=lambda one: one.total)

    @cached_property
    def ranked(self) -> list[Trial]:
        """Trials that fit, fastest first; then the others, smallest first. In each group, compiled ones are first."""

        def order(one: Trial) -> tuple[bool, bool, float]:
            fits = self.trials.fits(one)
            return not fits, one.cost is None, one.seconds if fits else one.total

        return sorted(self.trials.all, key=order)

    def reason(self, one: Trial) -> str:
        """The reason why a trial is not the best."""
        if one is self.best:
            return "fastest that fits"
        if one.refused:
            return one.refused
        about = "" if one.cost else "about "
        if not self.trials.fits(one):
            kinds = sorted(one.kinds.items(), key=lambda kind: -kind[1])[:KINDS]
            largest = ", ".join(f"{name} {format_bytes(size)}" for name, size in kinds)
            needs = f"needs {about}{format_bytes(one.total)}: {largest}"
            if one.total <= self.trials.limit:
                needs = f"needs {about}{format_bytes(one.host)} of {format_bytes(self.target.host_memory)} host memory"
            change = self._fitting_change(one) if one.cost else None
            return f"{needs}; try {change}" if change else needs
        if one in self.front:
            return f"fastest within {format_bytes(one.total)}"
        assert self.best
        return f"{about}{one.seconds / self.best.seconds:.2f} x the time of the fastest"

    def _fitting_change(self, one: Trial) -> str | None:
        """The change of a single setting with which the trial fits, at the least increase in time."""
        own = one.candidate.settings

        def differ(other: Trial) -> set[str]:
            changed = (key for key, value in other.candidate.settings.items() if value != own[key])
            return {key.partition(".")[0] if key.startswith(ONE_SETTING) else key for key in changed}

        fitting = [other for other in self.trials.all if self.trials.fits(other) and len(differ(other)) == 1]
        nearest = min(fitting, key=lambda other: (other.cost is None, other.seconds), default=None)
        return " ".join(overrides(difference(one.cfg, nearest.cfg))) if nearest else None

    def write(self, path: str | Path) -> None:
        """The best config as a file for `train`."""
        save_best(self.best.cfg if self.best else None, path)

    def as_json(self) -> dict[str, Any]:
        return {
            "target": target_json(self.target, self.trials.limit),
            "allow": list(self.allow),
            "considered": len(self.trials.all),
            "compiled": len(self.trials.compiled),
            "estimate_error": self.trials.estimate_error,
            "candidates": [self._json(one) for one in self.ranked],
            "front": [self._json(one) for one in self.front],
            "best": self._json(self.best) if self.best else None,
            "smallest": self._json(self.smallest) if self.trials.compiled else None,
            "others": self.others.as_json() if self.others else None,
            "seconds": self.seconds,
        }

    def _json(self, one: Trial) -> dict[str, Any]:
        return {
            "config": dict(one.candidate.changes),
            "total": int(one.total),
            "estimated_step_seconds": one.seconds,
            "fits": self.trials.fits(one),
            "compiled": one.cost is not None,
            "why": self.reason(one),
        }

    def table(self) -> Any:
        """A table for a terminal of 40 columns or more."""
        from rich.console import Group

        return Group(*self._lines())

    def _lines(self) -> Iterator[Any]:
        from rich.table import Table
        from rich.text import Text

        trials = self.trials
        yield Text(f"{self.given.name} on {self.target.name}", style="bold")
        yield Text(
            f"{len(trials.all):,} configs considered, {len(trials.compiled)} compiled, in {self.seconds:.0f} s;"
            f" {format_bytes(trials.limit)} per device"
        )
        if self.best:
            table = Table(title="Fastest first, each next one in less memory", title_justify="left")
            table.add_column("step", justify="right", no_wrap=True)
            table.add_column("memory", justify="right", no_wrap=True)
            table.add_column("changes")
            for one in self.front:
                table.add_row(
                    format_seconds(one.seconds), format_bytes(one.total), Text(one.overrides)
                )  # brackets in the text are not markup
            yield table
            yield Text(f"fastest: {self.best.overrides}", style="green")
        else:
            yield Text("nothing fits", style="red")
            yield Text(f"smallest found: {format_bytes(self.smallest.total)} with {self.smallest.overrides}")
        if self.others:
            yield self.others.table()
            return
        others = [one for one in self.ranked if one.cost and one not in self.front][:OTHERS]
        if others:
            yield Text("Other compiled configs:")
        for one in others:
            yield Text(f"  {one.overrides}: {self.reason(one)}", style="dim")
        if error := trials.estimate_error:
            yield Text(
                f"error of the estimates: median {error['median']:.1%}, largest {error['largest']:.1%},"
                f" over {error['compared']:.0f} compiled steps"
            )

    def figure(self, path: str | Path) -> None:
        """Writes a PNG: memory against time of every candidate."""
        from jaxmem.report.matplotlib_figure import figure

        trials = self.trials
        with figure(path) as drawn:
            axes = drawn.subplots()
            near = [one for one in trials.all if one.total < 2 * trials.limit]
            for group, label, color in (
                ([one for one in near if not one.cost], "estimated", "lightgray"),
                ([one for one in near if one.cost], "compiled", "tab:blue"),
            ):
                axes.scatter([one.seconds for one in group], [one.total / GIB for one in group], 16, color, label=label)
            steps, sizes = [one.seconds for one in self.front], [one.total / GIB for one in self.front]
            axes.plot(steps, sizes, "o-", c="tab:orange", label="front")
            axes.axhline(trials.limit / GIB, c="tab:red", ls="--", label="device memory")
            title = [f"{self.given.name} on {self.target.name}"]
            if self.best:
                axes.set_xlim(0, 1.1 * SLOWEST * self.best.seconds)
                title += textwrap.wrap(f"fastest: {self.best.overrides}", 100)
            axes.set_xlabel("seconds per step (estimated)")
            axes.set_ylabel("GiB per device")
            axes.set_title("\n".join(title), fontsize=10)
            axes.legend(loc="upper right")
