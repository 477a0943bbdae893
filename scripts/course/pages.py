"""Writes the pages of the course: docs/tour/TOPIC.md and .png, and docs/tour.md, which lists them.

python scripts/course/pages.py              # every topic, one after the other, each in a process of its own
python scripts/course/pages.py memory peak  # these alone, and the list
python scripts/course/pages.py list         # the list alone
"""

import subprocess
import sys
from pathlib import Path

from scripts.course import STOPS

DOCS = Path(__file__).parents[2] / "docs"
HEAD = """# The course

Each file of `scripts/course/` shows a technique with its numbers, on a machine with or without a GPU:

```sh
pip install -e '.[tour]'
python scripts/course/shardings.py  # tables, and a figure in runs/tour
```

A file explains the idea, prints tables, draws a figure in `runs/tour/`, and names the setting that enables the
technique and the files that implement it. A file that takes about a minute or more on two cores says so first. Some
have options (`--help`); those that compile a step do so for another GPU with `--target a100-80gb`. Compiled steps are
cached.

These pages were written by `python scripts/course/pages.py`.

| file | shows | config |
| --- | --- | --- |
"""


def row(topic: str) -> str:
    """A line of the list: the topic, its page, and the settings that enable it."""
    config = ", ".join(f"`{setting}`" for setting in STOPS[topic].config)
    return f"| [{topic}](tour/{topic}.md) | {STOPS[topic].about} | {config} |\n"


def main(topics: list[str]) -> None:
    for topic in (topic for topic in topics or STOPS if topic != "list"):
        print(topic, flush=True)
        script = Path(__file__).with_name(f"{topic}.py")
        page = DOCS / f"tour/{topic}.md"
        subprocess.run([sys.executable, str(script), "--write", str(page)], check=True)
    (DOCS / "tour.md").write_text(HEAD + "".join(map(row, STOPS)), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
