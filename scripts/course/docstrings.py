"""Questions about the Python standard library, without a network: what does X do, answered by the first line of X's
docstring."""

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from jaxmem.data.text import stdlib_files

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
MIN_ANSWER = 16  # characters
MAX_ANSWER = 90


def source_files() -> tuple[list[Path], Path]:
    """The standard library's modules, and the folder that has all of them."""
    files = stdlib_files()
    return files, next(folder for folder in files[0].parents if all(file.is_relative_to(folder) for file in files))


def questions(files: Sequence[Path], root: Path) -> dict[str, str]:
    """Questions and answers for each public function and class of these modules that has a docstring."""
    answers: dict[str, str] = {}
    for file in files:
        module = ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        if any(part.startswith("_") for part in module.split(".")):
            continue
        try:
            tree = ast.parse(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, SyntaxError):  # templates, and files that test the parser
            continue
        for name, node in _public(tree):
            summary = (ast.get_docstring(node) or "").partition("\n")[0].strip()
            if MIN_ANSWER <= len(summary) <= MAX_ANSWER and re.match(r"[A-Z][a-z]+ ", summary):
                answers.setdefault(f"What does {module}.{name} do?", summary)
    return answers


def _public(parent: ast.Module | ast.ClassDef, prefix: str = "") -> Iterator[tuple[str, Definition]]:
    for node in parent.body:
        if isinstance(node, Definition) and not node.name.startswith("_"):
            yield f"{prefix}{node.name}", node
            if isinstance(node, ast.ClassDef):
                yield from _public(node, f"{prefix}{node.name}.")
