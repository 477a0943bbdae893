"""Conversations from the Python standard library, without a network: what does X do, answered by the first line of X's
docstring; and what is X: a class, a method or a function. Also a tokenizer trained on its source text, with special
tokens and a chat template.
"""

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from jaxmem.data.text import stdlib_files

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
SAMPLE_BYTES = 2 << 20  # bytes of source text that the tokenizer is trained on
MIN_ANSWER, MAX_ANSWER = 16, 90  # characters of an answer
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|user|>", "<|assistant|>")  # the end of a turn, and the beginnings of turns


def source_files() -> tuple[list[Path], Path]:
    """The standard library's modules, and the folder that has all of them."""
    files = stdlib_files()
    return files, next(folder for folder in files[0].parents if all(file.is_relative_to(folder) for file in files))


def questions(files: Sequence[Path], root: Path) -> dict[str, str]:
    """Questions and answers for each public function and class of these modules that has a docstring."""
    answers: dict[str, str] = {}
    for module, name, node in _definitions(files, root):
        summary = (ast.get_docstring(node) or "").partition("\n")[0].strip()
        if MIN_ANSWER <= len(summary) <= MAX_ANSWER and re.match(r"[A-Z][a-z]+ ", summary):
            answers.setdefault(f"What does {module}.{name} do?", summary)
    return answers


def kinds(files: Sequence[Path], root: Path) -> dict[str, str]:
    """Questions and answers for each name that is defined in these modules: whether it is a class, method or
    function."""
    answers: dict[str, str] = {}
    for _, name, node in _definitions(files, root):
        kind = "class" if isinstance(node, ast.ClassDef) else "method" if "." in name else "function"
        answers.setdefault(f"What is {name}?", f"A {kind}.")
    return answers


def _definitions(files: Sequence[Path], root: Path) -> Iterator[tuple[str, str, Definition]]:
    """The definitions of these files, as (module, name in the module, definition)."""
    for file in files:
        module = ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        if any(part.startswith("_") for part in module.split(".")):
            continue
        try:
            tree = ast.parse(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, SyntaxError):  # templates, and files that test the parser
            continue
        yield from ((module, name, node) for name, node in _public(tree))


def _public(parent: ast.Module | ast.ClassDef, prefix: str = "") -> Iterator[tuple[str, Definition]]:
    for node in parent.body:
        if isinstance(node, Definition) and not node.name.startswith("_"):
            yield f"{prefix}{node.name}", node
            if isinstance(node, ast.ClassDef):
                yield from _public(node, f"{prefix}{node.name}.")


def write_conversations(answers: Mapping[str, str], file: Path) -> None:
    """JSONL with `messages`, as OpenAI's API has them."""
    with file.open("w", encoding="utf-8") as opened:
        for question, answer in answers.items():
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            opened.write(json.dumps({"messages": messages}) + "\n")


def train_tokenizer(files: Sequence[Path], vocab: int, special: Sequence[str], length: int) -> Any:
    """A byte-level BPE tokenizer, trained on the first `each` bytes of every file."""
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )
    beginnings = (file.read_bytes()[:length].decode(errors="ignore") for file in files)
    tokenizer.train_from_iterator(beginnings, trainer)
    return tokenizer


def write_tokenizer(files: Sequence[Path], place: Path, vocab: int = 512) -> None:
    """Writes tokenizer.json, and the chat template next to it."""
    place.mkdir(parents=True, exist_ok=True)
    train_tokenizer(files, vocab, SPECIAL, SAMPLE_BYTES // len(files)).save(str(place / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[0]}
    (place / "tokenizer_config.json").write_text(json.dumps(settings) + "\n")
    (place / "chat_template.jinja").write_text(TEMPLATE)
