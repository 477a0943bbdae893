"""The lectures: `python scripts/course/TOPIC.py` explains a technique with numbers that it computes on this machine. A
topic is an entry of stops.yaml, with its text, and a file of the same name, which computes the numbers.

    python scripts/course/memory.py                       # tables, and a figure in runs/tour
    python scripts/course/memory.py --target a100-80gb    # compiled for another GPU
    python scripts/course/memory.py --write memory.md     # also a Markdown page and its figure
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml
from rich.console import RenderResult
from rich.text import Text

from jaxmem.errors import UserError
from jaxmem.typing import JsonView
from scripts.course.panels import Panel, draw
from scripts.course.table import Table

SIMULATED = 8  # the number of simulated devices, for stops that use them


@dataclass(frozen=True)
class Findings:
    """The results of a stop. `facts`: the values that its note names; `panels`: the panels of the figure, in columns of
    these `widths` in inches (None: all panels side by side); `animation`: an SVG beside it."""

    tables: Sequence[Table]
    facts: JsonView = field(default_factory=dict)
    panels: Sequence[Panel] = ()
    widths: Sequence[float] | None = None
    animation: str | None = None


@dataclass(frozen=True)
class Stop:
    """An entry of stops.yaml. `measure(target, **options)` of its module returns Findings; if the entry has no target,
    `measure(**options)`."""

    topic: str
    about: str
    idea: str
    note: str
    uses: Literal["compiler", "devices", "simulated"]
    config: Sequence[str]
    read: Sequence[str]
    target: str | None = None
    duration: str = ""
    options: Mapping[str, int] = field(default_factory=dict)  # numbers that the command line can change

    def visit(self, target: str | None = None, **options: int) -> Visit:
        """Measures. `target` and `options` replace those of the stop."""
        if target is not None:
            self._check(target)
        module = importlib.import_module(f"{__name__}.{self.topic}")
        arguments = [target or self.target] if self.target else []
        return Visit(self, module.measure(*arguments, **{**self.options, **options}))

    def _check(self, target: str) -> None:
        from jaxmem.planning.targets import parse_target

        refusal = f"{self.topic} does not support --target {target}"
        if self.target is None:
            raise UserError(f"{refusal}: it runs on this machine; remove the option")
        if parse_target(target).gpu is None:
            raise UserError(f"{refusal}: it has no GPU; use a GPU such as {self.target}")


@dataclass(frozen=True)
class Visit:
    """A stop and its findings."""

    stop: Stop
    findings: Findings

    def draw(self, path: Path) -> bool:
        """Writes the figure; False if the stop has none."""
        if self.findings.panels:
            draw(path, self.findings.panels, self.findings.widths)
        if self.findings.animation:
            path.with_suffix(".svg").write_text(self.findings.animation, encoding="utf-8")
        return bool(self.findings.panels)

    def __rich_console__(self, *_: Any) -> RenderResult:
        yield from (Text(f"{paragraph}\n") for paragraph in self._paragraphs)
        yield from self.findings.tables
        yield Text(self.note)
        yield Text(f"Config: {', '.join(self.stop.config)}")
        yield Text(f"Read: {', '.join(self.stop.read)}")

    def markdown(self, picture: Path | None = None) -> str:
        """The page in docs/tour. `picture`: the file of its figure, whose digest is beside it."""
        from jaxmem.report import figure

        topic = self.stop.topic
        parts = [f"# {topic}: {self.stop.about}", f"Made by `python scripts/course/{topic}.py`.", *self._paragraphs]
        parts += [table.markdown() for table in self.findings.tables]
        if picture:
            parts.append(f"![{topic}]({picture.name})<!-- figure {figure.digest_of(picture)} -->")
        if picture and self.findings.animation:
            parts.append(f"![{topic}, animated]({picture.with_suffix('.svg').name})")
        parts.append(self.note)
        parts.append(f"Config: {', '.join(f'`{setting}`' for setting in self.stop.config)}")
        parts.append(f"Read: {', '.join(f'[{file}](../../{file})' for file in self.stop.read)}")
        return "\n\n".join(parts) + "\n"

    @property
    def _paragraphs(self) -> Iterator[str]:
        return (" ".join(paragraph.split()) for paragraph in self.stop.idea.split("\n\n"))

    @property
    def note(self) -> str:
        return self.stop.note.format(**self.findings.facts)


_ENTRIES = yaml.safe_load(Path(__file__).with_name("stops.yaml").read_text(encoding="utf-8"))
STOPS = {topic: Stop(topic, **entry) for topic, entry in _ENTRIES.items()}


def main(file: str, arguments: Sequence[str] | None = None) -> None:
    """The command line of a topic, whose file this is."""
    from jaxmem.cli.start import show, take_devices
    from jaxmem.report import figure

    stop = STOPS[Path(file).stem]
    parser = argparse.ArgumentParser(description=stop.about)
    parser.add_argument("--target", help="GPU to compile for, such as h100-80gb")
    parser.add_argument("--write", type=Path, metavar="FILE", help="also write a Markdown page and its figure")
    for name, default in stop.options.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, metavar="N")
    options = parser.parse_args(arguments)
    take_devices(SIMULATED if stop.uses == "simulated" else None, only_compile=stop.uses == "compiler")
    if stop.duration:
        print(f"{stop.topic} takes {stop.duration} on two cores without a GPU.", file=sys.stderr, flush=True)
    try:
        visit = stop.visit(options.target, **{name: getattr(options, name) for name in stop.options})
    except UserError as error:
        sys.exit(f"error: {error}")
    picture = (options.write or Path("runs/tour") / stop.topic).with_suffix(".png")
    drawn = figure.can_draw() and visit.draw(picture)
    if options.write:
        options.write.write_text(visit.markdown(picture if drawn else None), encoding="utf-8")
    show(visit)
    if drawn:
        print(f"Figure: {picture}")
    elif visit.findings.panels:
        print(f"No figure: {figure.MISSING}")
