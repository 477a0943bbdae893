"""A stop of the tour: an idea, measured as tables, a note and a figure, with its settings and source files."""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import RenderResult
from rich.text import Text

from jaxmem.errors import UserError
from jaxmem.lab.tour.table import Panel, Table, draw

SIMULATED = 8  # the number of simulated devices, for stops that use them


@dataclass(frozen=True)
class Findings:
    """The results of a stop. `note`: definitions, and the result with its numbers; `panels`: the panels of the
    figure."""

    tables: Sequence[Table]
    note: str
    panels: Sequence[Panel] = ()


@dataclass(frozen=True)
class Stop:
    """An entry of stops.yaml. The docstring of its module explains the idea, and `measure(target)` returns Findings; if
    the entry has no target, `measure` has no argument."""

    topic: str
    about: str
    uses: Literal["compiler", "devices", "simulated"]
    config: Sequence[str]
    read: Sequence[str]
    target: str | None = None
    duration: str = ""

    def visit(self, target: str | None = None) -> Visit:
        """Measures. `target`: replaces the target of the stop."""
        if target is not None:
            self._check(target)
        start = time.perf_counter()
        module = importlib.import_module(f"jaxmem.lab.tour.{self.topic}")
        findings = module.measure(target or self.target) if self.target else module.measure()
        return Visit(self, module.__doc__ or "", findings, time.perf_counter() - start)

    def _check(self, target: str) -> None:
        from jaxmem.planning.targets import parse_target

        refusal = f"tour {self.topic} does not support --target {target}"
        if self.target is None:
            raise UserError(f"{refusal}: it runs on this machine; remove the option")
        if parse_target(target).gpu is None:
            raise UserError(f"{refusal}: it has no GPU; use a GPU such as {self.target}")


@dataclass(frozen=True)
class Visit:
    """A stop, the explanation of its idea, its findings, and the seconds that they took."""

    stop: Stop
    explanation: str
    findings: Findings
    seconds: float

    def as_json(self) -> dict[str, Any]:
        rows = [row for table in self.findings.tables for row in table.rows]
        return {"topic": self.stop.topic, "rows": rows, "seconds": self.seconds}

    def draw(self, path: Path) -> bool:
        """Writes the figure; False if the stop has none."""
        if self.findings.panels:
            draw(path, self.findings.panels)
        return bool(self.findings.panels)

    def __rich_console__(self, *_: Any) -> RenderResult:
        yield from (Text(f"{paragraph}\n") for paragraph in self._paragraphs)
        yield from self.findings.tables
        yield Text(self.findings.note)
        yield Text(f"Config: {', '.join(self.stop.config)}")
        yield Text(f"Read: {', '.join(self.stop.read)}")

    def markdown(self, picture: Path | None = None) -> str:
        """The page in docs/tour. `picture`: the file of its figure."""
        topic = self.stop.topic
        parts = [f"# {topic}: {self.stop.about}", f"Made by `jaxmem tour {topic}`.", *self._paragraphs]
        parts += [table.markdown() for table in self.findings.tables]
        parts += [f"![{topic}]({picture.name})"] if picture else []
        parts.append(self.findings.note)
        parts.append(f"Config: {', '.join(f'`{setting}`' for setting in self.stop.config)}")
        parts.append(f"Read: {', '.join(f'[{file}](../../{file})' for file in self.stop.read)}")
        return "\n\n".join(parts) + "\n"

    @property
    def _paragraphs(self) -> Iterator[str]:
        return (" ".join(paragraph.split()) for paragraph in self.explanation.split("\n\n"))
