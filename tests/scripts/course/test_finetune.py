"""The worked example's data: questions out of docstrings, and a tokenizer that conversations can be put into."""

from pathlib import Path

import pytest

from jaxmem.config import load_config
from jaxmem.data.chat import ChatEncoder
from jaxmem.data.chat_forms import chat_of
from jaxmem.data.chat_template import template_for
from jaxmem.data.tokenizer import tokenizer_for
from jaxmem.errors import UserError
from scripts.course import STOPS
from scripts.course.docstrings import kinds, questions, write_tokenizer
from scripts.course.finetune import FINETUNE, PRETRAIN

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
    assert list(kinds(files, files[0].parent).values()) == [
        f"A {kind}." for kind in ("function", "class", "method", "function", "function")
    ]


def test_the_tokenizer_knows_whose_turn_it_is(files: list[Path], tmp_path: Path) -> None:
    write_tokenizer(files, tmp_path)
    tokenizer = tokenizer_for(str(tmp_path))
    asked, told = next(iter(questions(files, files[0].parent).items()))
    found = ChatEncoder(tokenizer, template_for(tokenizer)).document(chat_of({"prompt": asked, "completion": told}))
    assert found.is_target is not None
    assert tokenizer.decode(found.tokens[found.is_target]) == told
    assert found.tokens[-1] == tokenizer.end
    assert found.is_target[-1]


def test_its_configs_are_possible_and_it_has_no_target() -> None:
    for given, more in ((PRETRAIN, {}), (FINETUNE, {"model": PRETRAIN["model"]})):
        data = given["data"] | ({"path": "x", "chat_template": "x"} if given is FINETUNE else {})
        load_config({"name": "x", **given, **more, "data": data})
    with pytest.raises(UserError, match="finetune does not support --target h100-80gb"):
        STOPS["finetune"].visit("h100-80gb")
