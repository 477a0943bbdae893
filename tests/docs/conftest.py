"""The pages of README and docs, and what is typed on them."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.tiers import cases

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROGRAMS = ("jaxmem", "python", "make")


def written(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def own_scripts(page: Path) -> dict[str, str]:
    """The files of Python that a page writes out, each named in the sentence before it."""
    text = page.read_text(encoding="utf-8")
    return dict(re.findall(r"`(own_\w+\.py)`\s+defines.*?```python\n(.*?)```", text, re.DOTALL))


def typed(page: Path) -> list[list[str]]:
    """Every command of a page, each once, in words, without what starts it (`srun jaxmem ...`) or where its output
    goes."""
    text = "\n".join(written(page, "sh")).replace("\\\n", " ")
    found = []
    for line in text.splitlines():
        words = shlex.split(line.partition(" > ")[0], comments=True)
        first = next((at for at, word in enumerate(words) if word in PROGRAMS), None)
        if first is not None and words[first:] not in found:
            found.append(words[first:])
    return found


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test of `words` is of each command, one of `page` of each page, with `commands` of those that have some."""
    wanted = metafunc.fixturenames
    if "words" in wanted:
        every = [(f"{named(page)}: {' '.join(words)[:60]}", words) for page in PAGES for words in typed(page)]
        metafunc.parametrize("words", [words for _, words in every], ids=[name for name, _ in every])
    elif "page" in wanted:
        pages = [page for page in PAGES if "commands" not in wanted or typed(page)]
        if "commands" in wanted:
            pages = cases(pages)  # tests/test_cli.py has the commands, tests/scripts the programs
        metafunc.parametrize("page", pages, ids=named)


@pytest.fixture
def commands(page: Path) -> list[list[str]]:
    return typed(page)


@pytest.fixture
def shown(page: Path) -> list[dict[str, Any]]:
    """What a page shows of configs."""
    return [yaml.safe_load(block) for block in written(page, "yaml")]
