"""Checks the planned figures that README, docs and configs state.

    python tests/support/check_numbers.py                   # they agree with each other (part of `make lint`)
    python tests/support/check_numbers.py --plan            # and with what is planned today; about half an hour
    python tests/support/check_numbers.py --plan llama3-8b  # figures of these configs only

A config states in its header the command that makes its figure, `jaxmem plan CONFIG --target GPU`, and `Planned: N
GiB`, and perhaps `N s per step`. A row of a table in README or docs that names a config repeats its figure in its last
cell. A figure in a text is followed by a comment with its command: `<!-- 21.9 GiB, 13.5 s: jaxmem plan CONFIG --target
GPU OVERRIDES -->`. The tables of scripts/bench and the pages of docs/tour name the command that prints them again. A
figure is followed by the digest of what it shows, `![name](name.png)<!-- figure 0123456789abcdef -->`, which is also in
the file: a page and a figure that were not made together differ.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from jaxmem.report.figure import digest_of
from scripts.bench import quality, quantization, recompute

ROOT = Path(__file__).parents[2]
PLANNED = re.compile(r"^# Planned: ([\d.]+) GiB", re.MULTILINE)
SECONDS = re.compile(r"^#.*?([\d.]+) s per step", re.MULTILINE)
HEADER = re.compile(r"^#\s+jaxmem plan\s+(configs/\S+\.yaml) --target (\S+)$", re.MULTILINE)
COMMENT = re.compile(
    r"<!-- (?P<sizes>[\d., GiBs]+): jaxmem plan configs/(\S+)\.yaml --target (\S+)(.*?) -->", re.DOTALL
)
ROW = re.compile(r"^\|.*configs/(?P<name>[\w-]+)\.yaml[`)].*\| (?P<gib>[\d.]+)(?: GiB)?(?: per device)? \|$")
PICTURE = re.compile(r"!\[[^\]]*\]\(([^)]+\.png)\)\s*<!-- figure (\w+) -->")
SIZE = re.compile(r"([\d.]+) (GiB|s)\b")


def draw_recompute(file: Path) -> None:
    recompute.draw_rows(json.loads((ROOT / "docs/benchmarks/recompute.json").read_text())["rows"], file)


def draw_bits_curve(file: Path) -> None:
    quantization.draw_losses(json.loads((ROOT / "docs/benchmarks/bits-curve.json").read_text())["rows"], file)


def draw_quality(file: Path) -> None:
    quality.draw(quality.comparable(quality.rows(quality.METHODS)), file)


# Figures of recorded rows, which take a second to draw again.
REDRAWN = {
    "recompute.png": draw_recompute,
    "bits-curve.png": draw_bits_curve,
    "quality-135m.png": draw_quality,
}


class Figure(NamedTuple):
    """The figures of a plan that a text states: numbers as written, by unit (GiB per device, s per step)."""

    place: str
    config: str
    target: str
    overrides: str
    stated: dict[str, str]


def pages() -> Iterator[tuple[str, str]]:
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        yield str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")


def headers() -> Iterator[Figure]:
    """The figure of each config that has one in its header."""
    for path in sorted((ROOT / "configs").glob("*.yaml")):
        text = path.read_text(encoding="utf-8")
        command, planned = HEADER.search(text), PLANNED.search(text)
        if command and planned:
            seconds = SECONDS.search(text, planned.start())
            stated = {"GiB": planned[1]} | ({"s": seconds[1]} if seconds else {})
            yield Figure(f"configs/{path.name}", path.stem, command[2], "", stated)


def comments() -> Iterator[tuple[Figure, str]]:
    """Each figure that has its command in a comment, and the paragraphs before it."""
    for name, text in pages():
        for found in COMMENT.finditer(text):
            stated = {unit: number for number, unit in SIZE.findall(found["sizes"])}
            place = f"{name}:{text.count(chr(10), 0, found.start()) + 1}"
            figure = Figure(place, found[2], found[3], " ".join(found[4].split()), stated)
            yield figure, text[: found.start()].rsplit("\n#", 1)[-1]


def disagreements(figures: dict[str, Figure]) -> Iterator[str]:
    """Rows and texts that differ from the figures in headers and comments."""
    for page, text in pages():
        for number, line in enumerate(text.splitlines(), 1):
            row = ROW.match(line) if page == "README.md" or "[config](" in line else None
            if row is None:
                continue
            name, place = row["name"], f"{page}:{number}"
            if name not in figures:
                yield f"{place}: configs/{name}.yaml has no `jaxmem plan ... --target` with `Planned: N GiB`"
            elif (figure := figures[name]).stated["GiB"] != row["gib"] or figure.target.partition(":")[0] not in line:
                yield f"{place}: {row['gib']} GiB; the header states {figure.stated['GiB']} on {figure.target}"
    for figure, section in comments():
        for unit, size in figure.stated.items():
            if not re.search(rf"(?<![\d.]){re.escape(size)}(?![\d.]*\d)", section):
                yield f"{figure.place}: {size} {unit} is not in the text before"


def stale_pictures() -> Iterator[str]:
    """Figures whose digest is not the one beside them, or not that of the recorded rows, drawn today."""
    for page, text in pages():
        for file, stated in PICTURE.findall(text):
            digest = digest_of((ROOT / page).parent / file)
            if digest != stated:
                yield f"{page}: {file} has the digest {digest}, the page states {stated}; make both again"
    with tempfile.TemporaryDirectory() as folder:
        for name, draw in REDRAWN.items():
            draw(Path(folder, name))
            if digest_of(Path(folder, name)) != digest_of(ROOT / "docs" / name):
                yield f"docs/{name} is not what its script draws from docs/benchmarks today; draw it again"


def planned(figure: Figure) -> dict[str, float]:
    """The figures that its command plans today, whether it fits or not."""
    command = [sys.executable, "-m", "jaxmem", "plan", f"configs/{figure.config}.yaml", "--target", figure.target]
    command += ["--json", *figure.overrides.split()]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)  # 3: it does not fit
    plan = json.loads(done.stdout)
    return {"GiB": plan["bytes_per_device"]["total"] / 2**30, "s": plan["estimated_step_seconds"] or 0.0}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", nargs="*", metavar="NAME", help="compile all figures, or those of these configs")
    args = parser.parse_args()
    figures = {figure.config: figure for figure in headers()}
    wrong = [*disagreements(figures), *stale_pictures()]
    every = [*figures.values(), *(figure for figure, _ in comments())] if args.plan is not None else []
    for figure in every if not args.plan else [one for one in every if one.config in args.plan]:
        now = planned(figure)
        for unit, number in figure.stated.items():
            line = f"{figure.place}: {now[unit]:.2f} {unit} on {figure.target}, stated {number}"
            print(line, flush=True)
            if f"{now[unit]:.{len(number.partition('.')[2])}f}" != number:
                wrong.append(line)
    print(*wrong, sep="\n", end="\n" if wrong else "")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
