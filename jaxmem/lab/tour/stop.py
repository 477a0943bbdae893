"""A stop of the tour: an idea, its measurement as tables, a note and a figure, and where to turn it on and read it."""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console, ConsoleOptions, RenderableType
from rich.text import Text

from jaxmem.errors import UserError
from jaxmem.lab.tour.panels import Panel, draw
from jaxmem.lab.tour.table import Table

if TYPE_CHECKING:
    from jaxmem.machine.gpus import Gpu
    from jaxmem.planning import Target

SIMULATED = 8  # devices of a stop that runs on simulated ones


@dataclass(frozen=True)
class Findings:
    """What a stop measured."""

    tables: Sequence[Table]
    note: str = ""  # definitions, and the result with its numbers, in a few sentences
    panels: Sequence[Panel] = ()  # of the figure


@dataclass(frozen=True)
class Stop:
    """`uses`: the compiler alone, this machine's devices, or simulated devices. `duration`: on two cores without a GPU,
    where it may be over a minute; printed before the stop begins. Its module has a docstring that explains the idea,
    and `measure(target's name or None)`, which returns Findings."""

    topic: str
    about: str
    uses: Literal["compiler", "devices", "simulated"]
    config: Sequence[str]  # settings that turn the idea on
    read: Sequence[str]  # files that implement it
    duration: str = ""

    def visit(self, target: str | None = None) -> Visit:
        start = time.perf_counter()
        module = importlib.import_module(f"jaxmem.lab.tour.{self.topic}")
        findings = module.measure(target)
        return Visit(self, module.__doc__ or "", findings, time.perf_counter() - start)


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

    def __rich_console__(self, _: Console, __: ConsoleOptions) -> Iterator[RenderableType]:
        yield from (Text(paragraph + "\n") for paragraph in self._paragraphs)
        yield from self.findings.tables
        yield Text(self.findings.note)
        yield Text(f"Config: {', '.join(self.stop.config)}")
        yield Text(f"Read: {', '.join(self.stop.read)}")

    def markdown(self, picture: Path | None = None) -> str:
        """A page for docs/tour. `picture`: the file of its figure."""
        stop, findings = self.stop, self.findings
        parts = [f"# {stop.topic}: {stop.about}", f"Made by `jaxmem tour {stop.topic}`.", *self._paragraphs]
        parts += [table.markdown() for table in findings.tables]
        parts += [f"![{stop.topic}]({picture.name})"] if picture else []
        parts += [findings.note] if findings.note else []
        parts.append(f"Config: {', '.join(f'`{setting}`' for setting in stop.config)}")
        parts.append(f"Read: {', '.join(f'[{file}](../../{file})' for file in stop.read)}")
        return "\n\n".join(parts) + "\n"

    @property
    def _paragraphs(self) -> list[str]:
        return [" ".join(paragraph.split()) for paragraph in self.explanation.split("\n\n") if paragraph.strip()]


def refuse_target(topic: str, target: str | None) -> None:
    """Raises where a stop has nothing to compile for a target."""
    if target is not None:
        raise UserError(f"tour {topic} does not support --target {target}: it runs on this machine; leave it out")


def gpu_target(topic: str, target: str) -> tuple[Target, Gpu]:
    """The target and its kind of GPU."""
    from jaxmem.planning.targets import parse_target

    found = parse_target(target)
    if found.gpu is None:
        raise UserError(f"tour {topic} does not support --target {target}: it has no GPU; give one, such as h100-80gb")
    return found, found.gpu
