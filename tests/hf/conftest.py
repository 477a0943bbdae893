"""Tiny Hugging Face directories, made by the formula of the script that recorded what transformers makes of them."""

from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def directories(tmp_path_factory: pytest.TempPathFactory, compare: ModuleType) -> Path:
    """One for each case, by its name."""
    place = tmp_path_factory.mktemp("hugging-face")
    for name in compare.CASES:
        compare.write_directory(name, place / name)
    return place
