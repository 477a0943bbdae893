"""A stop of the tour: an idea, the tables and the figure that show its number, and where to turn it on and read it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Table
from rich.text import Text

from jaxmem.errors import UserError
from jaxmem.report.matplotlib_figure import figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = dict[str, Any]
Columns = dict[str, Callable[[Row], str]]  # heading -> how a row's cell reads
SIMULATED = 8  # devices of a stop that splits


def only_here(topic: str, target: str | None, does: str = "trains") -> None:
    """Refuse a target where a stop has nothing to compile for one."""
    if target is not None:
        raise UserError(f"--target {target}: tour {topic} {does} on this machine; leave it out")


@dataclass(frozen=True)
class Shown:
    """A table: rows of like fields; one field below the other where a terminal is too narrow for its words."""

    title: str
    rows: Sequence[Row]
    columns: Columns

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        widths = self._widths(options.max_width)
        if widths is not None:
            table = Table(title=self.title, title_justify="left")
            for heading, numbers, width in zip(self.columns, self._numbers, widths, strict=True):
                table.add_column(heading, justify="right" if numbers else "left", width=width)
            for cells in self._cells:
                table.add_row(*map(Text, cells))
            yield table
            return
        yield Text(self.title, style="italic")
        _, *headings = self.columns
        for name, *cells in self._cells:
            yield Text(name, style="bold")
            for heading, cell in zip(headings, cells, strict=True):
                if cell:
                    yield Text(f"  {heading}: {cell}")
        yield Text()

    def _widths(self, room: int) -> list[int] | None:
        """Of columns in which no word is broken, those that lack least at their full width; None: there is no room."""
        full, words = [], []
        for cells in zip(self.columns, *self._cells, strict=True):
            full.append(max(map(len, cells)))
            words.append(max(len(word) for cell in cells for word in cell.split() or [""]))
        spare = room - sum(words) - 3 * len(words) - 1  # a column's line and two spaces
        if spare < 0:
            return None
        for i in sorted(range(len(words)), key=lambda i: full[i] - words[i]):
            more = min(full[i] - words[i], spare)
            words[i], spare = words[i] + more, spare - more
        return words

    def markdown(self) -> str:
        ruled = ["---:" if numbers else "---" for numbers in self._numbers]
        return f"{self.title}\n\n" + "\n".join(
            f"| {' | '.join(cells)} |" for cells in (list(self.columns), ruled, *self._cells)
        )

    @property
    def _cells(self) -> list[list[str]]:
        return [[cell(row) for cell in self.columns.values()] for row in self.rows]

    @property
    def _numbers(self) -> list[bool]:
        """Which columns are of numbers, the first apart: these stand at the right."""
        _, *columns = zip(*self._cells, strict=True)
        return [False, *map(are_numbers, columns)]


def are_numbers(cells: Sequence[str]) -> bool:
    """Whether most of what is there begins as a number does.

    >>> are_numbers(["1.5 MiB", "", "-0.1"]), are_numbers(["all-gather", "2 sums", "none"]), are_numbers([""])
    (True, False, False)
    """
    there = [cell for cell in cells if cell]
    return sum(cell.lstrip("+-")[:1].isdigit() for cell in there) * 2 > len(there)


@dataclass(frozen=True)
class Found:
    """What a stop came to."""

    tables: Sequence[Shown]
    note: str = ""  # what they show, in a few sentences
    draw: Callable[[Figure], None] | None = None


@dataclass(frozen=True)
class Stop:
    """`uses`: it only compiles, or runs on this machine's devices, or on simulated ones. `takes`: how long on two cores
    without a GPU, where that may be over a minute; it is said before it begins."""

    topic: str
    about: str
    run: Callable[[str | None], Found]  # (target's name) -> what it shows
    uses: Literal["compiler", "devices", "simulated"]
    config: Sequence[str]  # what turns it on: settings of a config
    read: Sequence[str]  # the files that do it
    takes: str = ""

    def visit(self, target: str | None = None) -> Visit:
        start = time.perf_counter()
        return Visit(self, self.run(target), time.perf_counter() - start)


@dataclass(frozen=True)
class Visit:
    """A stop, what it came to, and how long that took."""

    stop: Stop
    found: Found
    seconds: float

    def as_json(self) -> Row:
        rows = [row for table in self.found.tables for row in table.rows]
        return {"topic": self.stop.topic, "rows": rows, "seconds": self.seconds}

    def draw(self, path: Path) -> bool:
        """Whether there was something to."""
        if self.found.draw:
            with figure(path, 9, 4.5) as drawn:
                self.found.draw(drawn)
        return bool(self.found.draw)

    def __rich_console__(self, _: Console, __: ConsoleOptions) -> Iterator[RenderableType]:
        yield from self.found.tables
        for heading, text in self._notes():
            yield Text(f"{heading}{text}")

    def _notes(self) -> Iterator[tuple[str, str]]:
        if self.found.note:
            yield "", self.found.note
        if self.stop.config:
            yield "Config: ", ", ".join(self.stop.config)
        if self.stop.read:
            yield "Read: ", ", ".join(self.stop.read)

    def markdown(self, picture: Path | None = None) -> str:
        """A page for docs, with the line that makes it anew. `picture`: where its figure lies."""
        parts = [
            f"# {self.stop.topic}: {self.stop.about}",
            f"Made by `jaxmem tour {self.stop.topic}`.",
            *(table.markdown() for table in self.found.tables),
            *([f"![{self.stop.topic}]({picture.name})"] if picture else []),
            *([self.found.note] if self.found.note else []),
            *([f"Config: {', '.join(f'`{one}`' for one in self.stop.config)}"] if self.stop.config else []),
            *([f"Read: {', '.join(f'[{one}](../../{one})' for one in self.stop.read)}"] if self.stop.read else []),
        ]
        return "\n\n".join(parts) + "\n"
