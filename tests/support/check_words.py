"""Checks the words of docs, comments, docstrings, messages and names of tests, and that public names have docstrings.

    python tests/support/check_words.py                 # what `make lint` checks
    python tests/support/check_words.py jaxmem/hf docs  # these folders

check_words.yaml has the terms, and the places where such a word means something else.
"""

import ast
import importlib
import inspect
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
FOLDERS = ("jaxmem", "kernels", "scripts", "docs", "configs", "tests", "README.md")

TABLES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
TERMS: dict[str, str] = TABLES["terms"]


def _pattern() -> re.Pattern[str]:
    terms = (f"(?P<t{n}>{term})" for n, term in enumerate(TERMS))
    return re.compile(rf"(?<![\w.`])(?:{'|'.join(terms)})(?![\w`(])".replace(" ", r"(?:\s+(?:#:?\s*)?)"))


PATTERN = _pattern()


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """(first line, text) of all prose; in Python that is comments, docstrings and messages, in YAML comments, in tests
    the names of tests, which are sentences."""
    text = path.read_text(encoding="utf-8")
    if path.is_relative_to(ROOT / "tests"):
        names = (named for named in definitions(path) if named[1].startswith("test_"))
        yield from ((line, name.replace("_", " ")) for line, name in names)
    elif path.suffix == ".yaml" and path.name != "stops.yaml":  # the pages of the course
        comments = "\n".join(line[line.find("#") :] if "#" in line else "" for line in text.splitlines())
        yield 1, comments
    elif path.suffix != ".py":
        yield 1, text
    else:
        start, comment = 0, ""
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                start, comment = (start, f"{comment}\n{token.string}") if comment else (token.start[0], token.string)
            elif token.type != tokenize.NL and comment:
                yield start, comment
                comment = ""
            if token.type == tokenize.STRING and " " in token.string:  # one word is a key or a name
                yield token.start[0], token.string


def definitions(path: Path) -> Iterator[tuple[int, str]]:
    """(line, name) of every function, class and argument of a Python file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if path.suffix == ".py" else ():
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg


def variables(path: Path) -> Iterator[tuple[int, str]]:
    """(line, name) of everything that a Python file gives a name: definitions, arguments, and what is assigned."""
    yield from definitions(path)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if path.suffix == ".py" else ():
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id if isinstance(node, ast.Name) else node.attr
        elif isinstance(node, ast.MatchAs | ast.MatchStar | ast.ExceptHandler) and node.name:
            yield node.lineno, node.name


def places(path: Path) -> Iterator[str]:
    """`file:line: 'text': its replacement`."""
    name = path.relative_to(ROOT)
    is_code = name.parts[0] in ("jaxmem", "kernels", "scripts")
    for line, variable in variables(path) if is_code else ():
        if variable.strip("_") in TABLES["pronouns"]:
            yield f"{name}:{line}: {variable!r}: a noun of the thing"
    for line, defined in definitions(path):
        if defined.lstrip("_") in TABLES["names"] and not path.is_relative_to(ROOT / "tests"):
            yield f"{name}:{line}: {defined!r}: a noun for a value, a verb for a function"
    for first, text in prose(path):
        for match in PATTERN.finditer(text):
            begin, end = text.rfind("\n", 0, match.start()) + 1, text.find("\n", match.end())
            context = text[begin : end if end >= 0 else None]
            if not any(str(path).endswith(file) and part in context for file, part in TABLES["elsewhere"]):
                replacement = list(TERMS.values())[int(str(match.lastgroup)[1:])]
                line = first + text.count("\n", 0, match.start())
                yield f"{name}:{line}: {' '.join(match.group().split())!r}: {replacement}"


def files(names: Iterable[str]) -> Iterator[Path]:
    for place in (ROOT / name for name in names):
        found = [place] if place.is_file() else sorted(place.rglob("*"))
        yield from (path for path in found if path.suffix in (".py", ".md", ".yaml"))


def without_docstring(folders: Iterable[str]) -> Iterator[str]:
    """Public functions and classes (in the `__all__` of a package) in these folders that have no docstring."""
    for init in (path for path in files(folders) if path.name == "__init__.py"):
        parts = init.parent.relative_to(ROOT).parts
        package = ".".join(parts if parts[0] == "jaxmem" else ("jaxmem", *parts))
        module = importlib.import_module(package) if parts[0] in ("jaxmem", "kernels") else None
        for name in getattr(module, "__all__", ()):
            value = getattr(module, name)
            if not (inspect.isclass(value) or inspect.isroutine(value)):
                continue
            own = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
            if not own or own.startswith(f"{name}("):  # what dataclasses write is not a docstring
                yield f"{init.relative_to(ROOT)}: {package}.{name} has no docstring"


def main(*names: str) -> int:
    folders = names or FOLDERS
    wrong = [place for path in files(folders) for place in places(path)] + list(without_docstring(folders))
    print(*wrong, sep="\n", end="\n" if wrong else "")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
