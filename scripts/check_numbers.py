"""Checks the planned figures that README, docs and configs state.

    python scripts/check_numbers.py                   # they agree with each other (part of `make lint`)
    python scripts/check_numbers.py --plan            # and with what the configs plan today; about half an hour
    python scripts/check_numbers.py --plan llama3-8b  # these configs only

A config states in its header the command that makes its figure, `jaxmem plan CONFIG --target GPU`, and `Planned: N
GiB`. A row of a table in README or docs that names a config repeats its figure in its last cell.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
COMMAND = re.compile(r"^#\s+jaxmem plan\s+(configs/\S+\.yaml) --target (\S+)$", re.MULTILINE)
PLANNED = re.compile(r"^# Planned: ([\d.]+) GiB", re.MULTILINE)
ROW = re.compile(r"^\|.*configs/(?P<name>[\w-]+)\.yaml[`)].*\| (?P<gib>[\d.]+)(?: GiB)?(?: per device)? \|$")


class Figure(NamedTuple):
    target: str
    gib: float


def stated() -> dict[str, Figure]:
    """The figure in the header of each config that has one, by the config's name."""
    found = {}
    for path in sorted((ROOT / "configs").glob("*.yaml")):
        header = path.read_text()
        command, planned = COMMAND.search(header), PLANNED.search(header)
        if command and planned:
            found[path.stem] = Figure(command[2], float(planned[1]))
    return found


def rows() -> Iterator[tuple[str, str, float, str]]:
    """Where a table repeats the figure of a config: place, name, figure, and the row."""
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            is_repeated = path.name == "README.md" or "[config](" in line
            if is_repeated and (row := ROW.match(line)):
                yield f"{path.relative_to(ROOT)}:{number}", row["name"], float(row["gib"]), line


def planned(name: str, target: str) -> float:
    """What a config plans today by its command, in GiB per device."""
    command = [sys.executable, "-m", "jaxmem", "plan", f"configs/{name}.yaml", "--target", target, "--json"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)  # 3: it does not fit
    return json.loads(done.stdout)["bytes_per_device"]["total"] / 2**30


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", nargs="*", metavar="NAME", help="compile all configs with a figure, or these")
    args = parser.parse_args()
    figures, wrong = stated(), []
    for place, name, gib, row in rows():
        if name not in figures:
            wrong.append(f"{place}: configs/{name}.yaml has no `jaxmem plan ... --target` with `Planned: N GiB`")
        elif (figure := figures[name]).gib != gib or figure.target.partition(":")[0] not in row:
            wrong.append(f"{place}: {gib:g} GiB; configs/{name}.yaml states {figure.gib:g} on {figure.target}")
    for name in figures if args.plan == [] else args.plan or ():
        target, gib = figures[name]
        now = planned(name, target)
        print(f"{name}: {now:.2f} GiB on {target}, stated {gib:g}", flush=True)
        if f"{now:.{len(str(gib).partition('.')[2])}f}" != f"{gib}":
            wrong.append(f"configs/{name}.yaml: planned {now:.2f} GiB on {target}, not {gib:g}")
    print(*wrong, sep="\n", end="\n" if wrong else "")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
