"""Writes the tour's pages: docs/tour/TOPIC.md and .png, and docs/tour.md, which lists them.

python scripts/tour.py              # every stop, one after the other, each in a process of its own
python scripts/tour.py memory gpu   # these alone, and the list
"""

import subprocess
import sys
from pathlib import Path

from jaxmem.lab.tour import STOPS, find_stop

DOCS = Path(__file__).parents[1] / "docs"
HEAD = """# The tour

The tour shows each technique with its numbers, on a machine with or without a GPU:

```sh
pip install -e '.[tour]'
jaxmem tour            # the list
jaxmem tour memory     # one stop; --target h100-80gb compiles for another GPU
```

A stop explains the idea, prints tables, draws a figure in `runs/tour/`, and names the setting that enables the
technique and the files that implement it. Most stops take less than a minute on two cores; `galore`, `memory`,
`precision`, `frontier` and `finetune` take about a minute and say so first. Compiled steps are cached. If the machine
has the GPUs that a stop compiles for, steps that fit also run, and the column `measured` has their peak memory.

These pages were written by `python scripts/tour.py`.

| stop | shows | config |
| --- | --- | --- |
"""


def row(topic: str) -> str:
    """A line of the list: the stop, its page, and the settings that enable it."""
    config = ", ".join(f"`{setting}`" for setting in STOPS[topic].config)
    return f"| [{topic}](tour/{topic}.md) | {STOPS[topic].about} | {config} |\n"


def main(topics: list[str]) -> None:
    for topic in [find_stop(name).topic for name in topics or STOPS]:
        print(topic, flush=True)
        page = str(DOCS / f"tour/{topic}.md")
        subprocess.run([sys.executable, "-m", "jaxmem", "tour", topic, "--write", page], check=True)
    (DOCS / "tour.md").write_text(HEAD + "".join(map(row, STOPS)), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
