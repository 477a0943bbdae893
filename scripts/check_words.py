"""Checks the words of docs, comments, docstrings and messages, and that public names have docstrings.

    python scripts/check_words.py                 # what `make lint` checks
    python scripts/check_words.py jaxmem/hf docs  # these folders

TERMS holds, for each term of the project's former dialect, the field's term that replaces it. A place where such a word
means something else is listed in ELSEWHERE, by the end of its path and a part of its text.
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

ROOT = Path(__file__).parents[1]
FOLDERS = ("jaxmem", "kernels", "scripts", "docs", "configs", "README.md")

# A space in a pattern is any white space, so that a term is found across lines too.
_AMOUNT = r"(?:\d|bytes?|bits?|[KMGT]i?B|numbers?|seconds?|ms|tokens?|updates?|kernels?|messages|copies|codes)"
_UNIT = (
    r"(?:parameter|weight|device|GPU|host|process|step|update|token|layer|head|block|row|batch|expert|second|number"
    r"|value|matrix|core|stage|sequence|direction)"
)
TERMS: dict[str, str] = {
    r"in codes|codes of (?:weights|moments)": "quantized",
    r"constants": "scales, zero points, absmax",
    r"rests? (?:in|as)|resting|at rest|(?:it|they|weights?|matrix|matrices) rests?": "stored (at rest: on disk only)",
    r"(?<!outer\s)(?<!inner\s)(?<!dot\s)products?": "matrix multiplication, matmul",
    r"(?:what|that|which) (?:does not |do not )?learns?|(?:does|do) not learn|learns? nothing": "trainable, frozen",
    r"(?:done|made|computed|each layer|the rest) again": "recompute (activation checkpointing)",
    r"layers? keeps?|kept for the backward": "saved activations",
    r"rows in turns|in turns": "micro-batches, gradient accumulation",
    r"l(?:ies|ie|ying) over": "sharded over",
    r"(?:is|are|lies?|stays?|held|kept|rests?) whole": "replicated, unsharded",
    r"split over|split (?:as|among) (?:the )?(?:devices|GPUs|shards)": "sharded over",
    r"messages": "communication, collectives",
    r"exchang(?:e|es|ed|ing)": "communication, all-to-all",
    r"go(?:es)? round|went round": "context parallelism; ring",
    r"beside (?:other )?kernels": "overlapped",
    r"averages|numbers a weight": "optimizer state, first and second moment",
    r"(?:look|search)(?:s|es|ed|ing)? for (?:a|its|their|the) (?:new )?bas[ie]s": "refreshes its projection",
    r"full(?:est)? moment|when memory is fullest|fullest": "peak memory",
    r"on stages|among (?:the )?stages": "pipeline parallelism",
    r"do(?:es)? nothing among|layers that do nothing": "padding layers, identity layers",
    r"what stays read|stays read": "KV cache",
    r"in one pass over memory": "fused",
    r"go(?:es)? with(?! the)": "supports, is compatible with",
    r"(?:is|are) none": "unknown x; expected one of ...",
    r"tables of tokens|token tables": "embedding and output matrices",
    rf"{_AMOUNT} an? {_UNIT}": "per parameter, per device, per step",
    r"\b[Tt]ells (?:of|how|what|which|that)|is told|are told|was told|told apart": "reports, says, returns",
    r"anew": "again, from the start",
}
NAMES = {"told", "said", "brought", "begun", "kept", "given", "held", "asked", "Way", "Some", "Piece"}  # of definitions
ELSEWHERE: tuple[tuple[str, str], ...] = (
    ("scripts/check_words.py", ""),  # the terms themselves
    ("data/chat.py", "messages"),  # of a conversation
    ("data/chat_forms.py", "messages"),
    ("data/chat_template.py", "messages"),
    ("data/preference.py", "messages"),
    ("data/records.py", "messages"),
    ("distributed/agree.py", "messages"),  # of sockets
    ("distributed/watch.py", "messages"),
    ("docs/several-hosts.md", "messages"),
    ("data/template_process.py", "messages"),
    ("inference/chat.py", "messages"),
    ("tour/docstrings.py", "messages"),
    ("docs/how-to/finetune.md", "messages"),
    ("docs/finetune.md", "messages"),
    ("docs/hugging-face.md", "messages"),
    ("machine/gpus.py", "product name"),
    ("training/memory_check.py", "there is none:"),
    ("training/progress.py", "fullest"),  # the device with the most bytes in use
)


def _pattern() -> re.Pattern[str]:
    terms = (f"(?P<t{n}>{term})" for n, term in enumerate(TERMS))
    return re.compile(rf"(?<![\w.`])(?:{'|'.join(terms)})(?![\w`(])".replace(" ", r"(?:\s+(?:#:?\s*)?)"))


PATTERN = _pattern()


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """(first line, text) of everything that a reader reads: of Python the comments, docstrings and messages."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".yaml":
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


def places(path: Path) -> Iterator[str]:
    """`file:line: 'text': its replacement`."""
    name = path.relative_to(ROOT)
    for line, defined in definitions(path):
        if defined.lstrip("_") in NAMES:
            yield f"{name}:{line}: {defined!r}: a noun for a value, a verb for a function"
    for first, text in prose(path):
        for match in PATTERN.finditer(text):
            begin, end = text.rfind("\n", 0, match.start()) + 1, text.find("\n", match.end())
            context = text[begin : end if end >= 0 else None]
            if not any(str(path).endswith(file) and part in context for file, part in ELSEWHERE):
                replacement = list(TERMS.values())[int(str(match.lastgroup)[1:])]
                line = first + text.count("\n", 0, match.start())
                yield f"{name}:{line}: {' '.join(match.group().split())!r}: {replacement}"


def files(names: Iterable[str]) -> Iterator[Path]:
    for place in (ROOT / name for name in names):
        found = [place] if place.is_file() else sorted(place.rglob("*"))
        yield from (path for path in found if path.suffix in (".py", ".md", ".yaml"))


def without_docstring(folders: Iterable[str]) -> Iterator[str]:
    """Public functions and classes (in the `__all__` of a package) below these folders that have no docstring."""
    for init in (path for path in files(folders) if path.name == "__init__.py"):
        parts = init.parent.relative_to(ROOT).parts
        package = ".".join(parts if parts[0] == "jaxmem" else ("jaxmem", *parts))
        module = importlib.import_module(package) if parts[0] in ("jaxmem", "kernels") else None
        for name in getattr(module, "__all__", ()):
            value = getattr(module, name)
            if not (inspect.isclass(value) or inspect.isroutine(value)):
                continue
            own = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
            if not own or own.startswith(f"{name}("):  # what dataclasses write is no docstring
                yield f"{init.relative_to(ROOT)}: {package}.{name} has no docstring"


def main(*names: str) -> int:
    folders = names or FOLDERS
    wrong = [place for path in files(folders) for place in places(path)] + list(without_docstring(folders))
    print(*wrong, sep="\n", end="\n" if wrong else "")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
