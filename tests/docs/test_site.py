"""What the site has besides the pages in docs/: the Python API, and files of the repository that pages link to.

`make docs` builds it strictly.
"""

import importlib
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from scripts import docs_site

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("module", docs_site.API)
def test_a_page_has_each_public_function(module: str) -> None:
    page = docs_site.module_page(module, docs_site.API[module])
    names = docs_site.API[module] or importlib.import_module(module).__all__
    for name in names:
        value = getattr(importlib.import_module(module), name)
        if callable(value):
            assert value.__doc__, name
            assert f"heading: {name}," in page or f"## {name}\n" in page, name
    for path in re.findall(r"::: (\S+)", page):
        place, _, name = path.rpartition(".")
        assert hasattr(importlib.import_module(place), name)


def test_examples_are_blocks_of_code() -> None:
    assert docs_site.with_example("Adds.\n\n>>> 1 + 1\n2") == "Adds.\n\n\n```pycon\n>>> 1 + 1\n2\n```\n"
    assert docs_site.with_example("Adds.") == "Adds."


@pytest.mark.parametrize(
    ("source", "link", "target"),
    [
        ("experts.md", "../configs/demo.yaml", "source/configs/demo.yaml.md"),
        ("how-to/chat.md", "../../scripts/chat.py", "../source/scripts/chat.py.md"),
        ("how-to/chat.md", "../plan.md#warnings", "../plan.md#warnings"),
        ("source/configs/README.md", "demo.yaml", "demo.yaml.md"),
        ("plan.md", "https://example.org/a.md", "https://example.org/a.md"),
    ],
)
def test_a_link_to_a_file_of_the_repository_leads_to_its_page(source: str, link: str, target: str) -> None:
    where = SimpleNamespace(file=SimpleNamespace(src_uri=source))
    assert docs_site.on_page_markdown(f"[text]({link})", where) == f"[text]({target})"


def test_each_file_that_a_page_links_to_is_a_page() -> None:
    files = {str(file.relative_to(ROOT)) for file in docs_site.linked_files()}
    assert {"scripts/chat.py", "configs/README.md", "configs/demo.yaml"} <= files
    assert "````python\n" in docs_site.source_page(ROOT / "scripts/chat.py")
