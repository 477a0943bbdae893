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
from jaxmem.figures import figure

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
    """A table: rows of like fields."""

    title: str
    rows: Sequence[Row]
    columns: Columns

    def __rich__(self) -> Table:
        table = Table(title=self.title, title_justify="left")
        for number, heading in enumerate(self.columns):
            table.add_column(heading, justify="right" if number else "left")
        for row in self.rows:
            table.add_row(*(Text(cell(row)) for cell in self.columns.values()))
        return table

    def markdown(self) -> str:
        ruled = ["---", *["---:"] * (len(self.columns) - 1)]
        lines = [list(self.columns), ruled, *([cell(row) for cell in self.columns.values()] for row in self.rows)]
        return f"{self.title}\n\n" + "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


@dataclass(frozen=True)
class Found:
    """What a stop came to."""

    tables: Sequence[Shown]
    note: str = ""  # what they show, in a few sentences
    draw: Callable[[Figure], None] | None = None


@dataclass(frozen=True)
class Stop:
    """`uses`: it only compiles, or runs on this machine's devices, or on simulated ones."""

    topic: str
    about: str
    run: Callable[[str | None], Found]  # (target's name) -> what it shows
    uses: Literal["compiler", "devices", "simulated"]
    config: Sequence[str]  # what turns it on: settings of a config
    read: Sequence[str]  # the files that do it

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
