"""A stop of the tour: a topic, and the table that it makes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table


@dataclass(frozen=True)
class Stopped:
    """What a stop shows: rows of like fields, and how long they took."""

    topic: str
    title: str
    rows: Sequence[dict[str, Any]]
    columns: dict[str, Callable[[dict[str, Any]], str]]  # heading -> how a row's cell reads
    seconds: float
    note: str = ""  # what the table shows, in a few sentences

    def as_json(self) -> dict[str, Any]:
        return {"topic": self.topic, "rows": list(self.rows), "seconds": self.seconds}

    def table(self) -> Table:
        """For people."""
        table = Table(title=self.title, title_justify="left")
        for number, heading in enumerate(self.columns):
            table.add_column(heading, justify="right" if number else "left")
        for row in self.rows:
            table.add_row(*(cell(row) for cell in self.columns.values()))
        return table

    def markdown(self) -> str:
        """For docs, with the line that makes it anew."""
        ruled = ["---", *["---:"] * (len(self.columns) - 1)]
        lines = [list(self.columns), ruled, *([cell(row) for cell in self.columns.values()] for row in self.rows)]
        table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
        note = f"\n\n{self.note}" if self.note else ""
        return f"{self.title}. Made by `jaxmem tour {self.topic}`.\n\n{table}{note}"


@dataclass(frozen=True)
class Stop:
    topic: str
    about: str
    run: Callable[..., Stopped]  # (target name) -> what it shows
    trains: bool = False  # on this machine, and does not only compile
