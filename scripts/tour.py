"""The tour's pages in docs, each made by its own stop: docs/tour/TOPIC.md and .png, and docs/tour.md, which lists them.

python scripts/tour.py              # every stop, one after the other, each in a process of its own
python scripts/tour.py memory gpu   # these alone, and the list
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from jaxmem.lab.tour import STOPS, stop

DOCS = Path(__file__).parents[1] / "docs"
HEAD = """# The tour

Every idea with its own number: `jaxmem tour TOPIC` prints a table, says what it shows, draws a figure in
`runs/tour/`, and names the setting that turns the idea on and the file to read; `pip install -e '.[tour]'` is all it
needs. Each takes up to a minute on two cores without a GPU; `galore`, `memory`, `precision` and `finetune` (about one)
say so first; what was compiled once is kept. Where the GPUs that a stop compiles for are in the machine, steps
that fit also run, and a column says what the devices held. These pages are what `python scripts/tour.py` made.

| stop | shows | config |
| --- | --- | --- |
"""


def row(topic: str) -> str:
    """Of the list: a stop, its page, what turns it on."""
    config = ", ".join(f"`{one}`" for one in STOPS[topic].config)
    return f"| [{topic}](tour/{topic}.md) | {STOPS[topic].about} | {config} |\n"


def main(topics: list[str]) -> None:
    for topic in [stop(name).topic for name in topics or STOPS]:
        print(topic, flush=True)
        page = str(DOCS / f"tour/{topic}.md")
        subprocess.run([sys.executable, "-m", "jaxmem", "tour", topic, "--write", page], check=True)
    (DOCS / "tour.md").write_text(HEAD + "".join(map(row, STOPS)), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
