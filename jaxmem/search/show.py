"""A search's result for people: a table that fits 40 columns, and a figure of memory against time."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.table import Table
from rich.text import Text

from jaxmem.machine.gpus import GIB
from jaxmem.planning import readable
from jaxmem.planning.text import duration
from jaxmem.report.matplotlib_figure import figure
from jaxmem.search.entries import SLOWEST, Entry
from jaxmem.search.result import Fit

if TYPE_CHECKING:
    from jaxmem.search.most import Most

LOSERS = 8  # rows


class Report:
    def __init__(self, fit: Fit) -> None:
        self.fit = fit

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        yield Group(*self._parts())

    def _parts(self) -> Iterator[RenderableType]:
        fit, known = self.fit, self.fit.known
        yield Text(f"{fit.given.name} on {fit.target.name}", style="bold")
        yield Text(
            f"{len(known.all):,} configs considered, {len(known.compiled)} compiled, in {fit.seconds:.0f} s;"
            f" {readable(known.limit)} for each device"
        )
        if fit.best:
            yield self._table("Fastest first, each next one in less memory", fit.front)
            yield Text(f"the fastest: {_settings(fit.best)}", style="green")
        else:
            yield Text("nothing fits", style="red")
            yield Text(f"smallest found: {readable(fit.smallest.total)} with {_settings(fit.smallest)}")
            if fit.helps:
                yield Text(f"what would help most: {fit.helps}")
        losers = [one for one in fit.ranked if one.facts and one not in fit.front][:LOSERS]
        if losers:
            yield Text("Others that were compiled:")
            for one in losers:
                yield Text(f"  {_settings(one)}: {fit.why(one)}", style="dim")
        if error := known.error:
            yield Text(
                f"the estimate before compiling was off by {error['median']:.1%} (median),"
                f" {error['largest']:.1%} at most, over {error['compared']:.0f}"
            )

    def _table(self, title: str, entries: list[Entry]) -> Table:
        table = Table(title=title, title_justify="left")
        table.add_column("step", justify="right", no_wrap=True)
        table.add_column("memory", justify="right", no_wrap=True)
        table.add_column("change")
        for one in entries:
            table.add_row(duration(one.seconds), readable(one.total), Text(_settings(one)))  # [] is no markup
        return table


def _settings(one: Entry) -> str:
    return " ".join(one.candidate.overrides) or "as it is"


def draw(fit: Fit, path: str | Path) -> None:
    """Every candidate, those compiled, and the front."""
    with figure(path) as drawn:
        known = fit.known
        axes = drawn.subplots()
        near = [one for one in known.all if one.total < 2 * known.limit]
        for entries, label, color in (
            ([one for one in near if not one.facts], "estimated", "lightgray"),
            ([one for one in near if one.facts], "compiled", "tab:blue"),
        ):
            axes.scatter([one.seconds for one in entries], [one.total / GIB for one in entries], 16, color, label=label)
        steps, sizes = [one.seconds for one in fit.front], [one.total / GIB for one in fit.front]
        axes.plot(steps, sizes, "o-", c="tab:orange", label="front")
        axes.axhline(known.limit / GIB, c="tab:red", ls="--", label="memory of a device")
        if fit.best:
            axes.set_xlim(0, 1.1 * SLOWEST * fit.best.seconds)
        axes.set_xlabel("seconds a step, estimated")
        axes.set_ylabel("GiB a device")
        title = [f"{fit.given.name} on {fit.target.name}"]
        title += textwrap.wrap(f"fastest: {_settings(fit.best)}", 100) if fit.best else []
        axes.set_title("\n".join(title), fontsize=10)
        axes.legend(loc="upper right")


def draw_curve(most: Most, path: str | Path) -> None:
    """Memory of a device by the size of a batch, and what it brings."""
    with figure(path) as drawn:
        memory, rate = drawn.subplots(1, 2)
        total = [one.total / GIB for one in most.curve]
        memory.plot([one.value for one in most.curve], total, "o-")
        memory.axhline(most.limit / GIB, c="tab:red", ls="--", label="memory of a device")
        memory.set_xlabel(most.key)
        memory.set_ylabel("GiB a device")
        memory.legend()
        rate.plot(total, [one.rate for one in most.curve], "o-", c="tab:orange")
        rate.axvline(most.limit / GIB, c="tab:red", ls="--")
        rate.set_xlabel("GiB a device")
        rate.set_ylabel("a second, estimated")
        for axes in (memory, rate):
            axes.set_ylim(bottom=0)
        drawn.suptitle(f"{most.key} on {most.target.name}")
