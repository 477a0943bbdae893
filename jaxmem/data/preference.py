"""Pairs of answers to the same prompt, one of which was preferred: lines of JSONL.

    {"prompt": "...", "chosen": "...", "rejected": "..."}
    {"prompt": [messages], "chosen": [messages], "rejected": [messages]}

Without a prompt, the answers begin at the first message that differs. Texts are tokenized as documents are, messages by
the chat template. Targets are the tokens of an answer and the token that ends it; of messages, what the assistant says
after the prompt. A row of a batch is a prompt and one answer; rows 2 i and 2 i + 1 are a pair. A pair that is skipped
is two rows of padding, which count nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from jaxmem.config.sections import Data, Source
from jaxmem.data.chat import JsonRecords, conversation, messages_from
from jaxmem.data.chat_template import ChatTemplate, template_for
from jaxmem.data.jsonl import parse_object, string_value
from jaxmem.data.records import Document, InvalidRecordError
from jaxmem.data.tokenizer import Tokenizer

ANSWERS = ("chosen", "rejected")


def open_source(paths: Sequence[Path], source: Source, data: Data, tokenizer: Tokenizer) -> Preferences:  # noqa: ARG001
    return Preferences(paths, data, tokenizer, cache(lambda: template_for(tokenizer, data.chat_template)))


class Preferences(JsonRecords):
    """The pairs of JSONL files."""

    documents_per_record = 2

    def __init__(
        self, paths: Sequence[Path], data: Data, tokenizer: Tokenizer, template: Callable[[], ChatTemplate]
    ) -> None:
        """`template` is called if there are messages."""
        super().__init__("pairs", paths, data)
        self._tokenizer, self._template = tokenizer, template
        self._last: tuple[int, Sequence[Document]] | None = None

    def is_usable(self, cut: Sequence[Document]) -> bool:
        return all(np.any(document.is_target) for document in cut)

    def documents(self, index: int) -> Sequence[Document]:
        if self._last is None or self._last[0] != index:  # the other row of the pair asks next
            self._last = index, super().documents(index)
        return self._last[1]

    def parse(self, line: bytes) -> Sequence[Document]:
        return pair(line, self._tokenizer, self._template)


def pair(line: bytes, tokenizer: Tokenizer, template: Callable[[], ChatTemplate]) -> tuple[Document, Document]:
    """The two answers of a line, each after the prompt."""
    found = parse_object(line)
    if missing := [answer for answer in ANSWERS if answer not in found]:
        raise InvalidRecordError(f"no {' and no '.join(missing)}; a pair has chosen and rejected")
    prompt, chosen, rejected = found.get("prompt"), found["chosen"], found["rejected"]
    if isinstance(chosen, list) and isinstance(rejected, list):
        return _pair_of_messages(prompt, chosen, rejected, tokenizer, template())
    before = np.array([*tokenizer.begin, *tokenizer.encode(string_value(prompt, "prompt"))], np.int32)

    def document(key: str) -> Document:
        answer = tokenizer.encode(string_value(found[key], key))
        tokens = np.concatenate([before, answer, np.array([tokenizer.end], np.int32)])
        return Document(tokens, np.arange(len(tokens)) >= max(len(before), 1), is_whole=True)

    return document("chosen"), document("rejected")


def _pair_of_messages(
    prompt: Any, chosen: Any, rejected: Any, tokenizer: Tokenizer, template: ChatTemplate
) -> tuple[Document, Document]:
    if isinstance(prompt, list):
        before = messages_from(prompt, "prompt")
    else:
        before = [] if prompt is None else [{"role": "user", "content": string_value(prompt, "prompt")}]
    one, other = [*before, *messages_from(chosen, "chosen")], [*before, *messages_from(rejected, "rejected")]
    first = len(before) or next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    if first is None:
        raise InvalidRecordError("chosen and rejected are the same")
    return conversation(one, tokenizer, template, first), conversation(other, tokenizer, template, first)
