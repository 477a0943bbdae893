"""Every example in a docstring is run as it stands."""

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = {"jaxmem": "jaxmem", "kernels": "jaxmem.kernels"}  # where modules lie: what they are called
MODULES = [
    ".".join((name, *path.relative_to(ROOT / folder).with_suffix("").parts)).removesuffix(".__init__")
    for folder, name in FOLDERS.items()
    for path in sorted((ROOT / folder).rglob("*.py"))
    if ">>> " in path.read_text()
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.IGNORE_EXCEPTION_DETAIL)
    assert result.attempted > 0
    assert result.failed == 0
