"""Tiny Hugging Face directories, made by the formula of the script that recorded what transformers makes of them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).parent
spec = importlib.util.spec_from_file_location(
    "compare_transformers", HERE.parents[1] / "scripts/compare_transformers.py"
)
compare = importlib.util.module_from_spec(spec)
spec.loader.exec_module(compare)


@pytest.fixture(scope="session")
def peers() -> ModuleType:
    return compare


@pytest.fixture(scope="session")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for each case, by its name."""
    place = tmp_path_factory.mktemp("hugging-face")
    for name in compare.CASES:
        compare.write_directory(name, place / name)
    return place
