"""Questions and answers from docstrings."""

from pathlib import Path

import pytest

from scripts.course.adapters import questions

SOURCE = '''
"""A module."""

def read(file):
    """Read all that is in a file.

    And more.
    """

class Box:
    """Hold things together."""

    def put(self, thing):
        """Put one more thing into it."""

    def _hidden(self):
        """Not a thing that is asked for."""

def terse():
    """Short."""

def bare():
    pass
'''


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("library")
    (root / "pack").mkdir()
    for name, text in {"pack/__init__.py": SOURCE, "_own.py": SOURCE, "broken.py": "def ("}.items():
        (root / name).write_text(text)
    return sorted(root.rglob("*.py"))


def test_what_is_asked_and_answered(files: list[Path]) -> None:
    assert list(questions(files, files[0].parent).items()) == [
        ("What does pack.read do?", "Read all that is in a file."),
        ("What does pack.Box do?", "Hold things together."),
        ("What does pack.Box.put do?", "Put one more thing into it."),
    ]
