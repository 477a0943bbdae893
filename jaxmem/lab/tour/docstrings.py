"""Conversations out of the Python standard library: what does X do? The first line of X's docstring.

And a tokenizer learnt from its source text, with the two tokens and the template that conversations need: everything
that a small model of one's own has to have, without a network.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

VOCAB = 2048
SAMPLE = 2 << 20  # bytes of source text that the tokenizer is learnt from
SHORTEST, LONGEST = 16, 90  # characters of an answer
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|user|>", "<|assistant|>")  # what ends a turn, and what begins it


def questions(files: Sequence[Path], root: Path) -> Iterator[tuple[str, str]]:
    """What each public function and class of these modules is said to do, each question once."""
    seen = set()
    for file in files:
        module = ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        if any(part.startswith("_") for part in module.split(".")):
            continue
        try:
            tree = ast.parse(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, SyntaxError):  # templates, and what is kept to test the parser
            continue
        for name, summary in _said(tree, module):
            if name not in seen:
                seen.add(name)
                yield f"What does {name} do?", summary


def _said(node: Any, name: str) -> Iterator[tuple[str, str]]:
    for child in getattr(node, "body", ()):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not child.name.startswith("_"):
            own = f"{name}.{child.name}"
            summary = (ast.get_docstring(child) or "").partition("\n")[0].strip()
            if SHORTEST <= len(summary) <= LONGEST and re.match(r"[A-Z][a-z]+ ", summary):
                yield own, summary
            if isinstance(child, ast.ClassDef):
                yield from _said(child, own)


def write_conversations(pairs: Sequence[tuple[str, str]], file: Path) -> None:
    """In the form that OpenAI's tools take."""
    with file.open("w", encoding="utf-8") as opened:
        for question, answer in pairs:
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            opened.write(json.dumps({"messages": messages}) + "\n")


def write_tokenizer(files: Sequence[Path], place: Path) -> None:
    """tokenizer.json of byte-level BPE, and the chat template beside it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sample(files), trainer)
    place.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(place / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[0]}
    (place / "tokenizer_config.json").write_text(json.dumps(named) + "\n")
    (place / "chat_template.jinja").write_text(TEMPLATE)


def _sample(files: Sequence[Path]) -> Iterator[str]:
    """The beginning of every file, as much of each."""
    each = SAMPLE // len(files)
    for file in files:
        with file.open("rb") as opened:
            yield opened.read(each).decode(errors="ignore")
