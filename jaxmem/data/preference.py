"""Pairs of answers to the same prompt, one of which was preferred: lines of JSONL.

    {"prompt": "...", "chosen": "...", "rejected": "..."}
    {"prompt": [messages], "chosen": [messages], "rejected": [messages]}      and the other forms of `chat_forms`

Three texts are tokenized as documents are, everything else by the chat template. Targets are the tokens of an answer
and the token that ends it. A row of a batch is a prompt and one answer; rows 2 i and 2 i + 1 are a pair. A pair that is
skipped is two rows of padding, which count nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np

from jaxmem.config.sections import Data, Source
from jaxmem.data.chat import ChatEncoder, JsonRecords
from jaxmem.data.chat_forms import pair_of
from jaxmem.data.chat_template import template_for
from jaxmem.data.jsonl import parse_object, string_value
from jaxmem.data.records import Document, InvalidRecordError
from jaxmem.data.tokenizer import Tokenizer

ANSWERS = ("chosen", "rejected")


class Preferences(JsonRecords):
    """The pairs of JSONL files."""

    noun, documents_per_record = "pairs", 2

    def __init__(self, paths: Sequence[Path], source: Source, data: Data, tokenizer: Tokenizer) -> None:
        super().__init__(paths, source, data, tokenizer)
        # Pairs of texts need no template.
        self._encoder = cache(lambda: ChatEncoder(tokenizer, template_for(tokenizer, data.chat_template)))
        self._last: tuple[int, Sequence[Document]] | None = None

    def documents(self, index: int) -> Sequence[Document]:
        if self._last is None or self._last[0] != index:  # the other row of the pair asks next
            self._last = index, super().documents(index)
        return self._last[1]

    def parse(self, line: bytes) -> Sequence[Document]:
        return parse_pair(line, self.tokenizer, self._encoder)


def parse_pair(line: bytes, tokenizer: Tokenizer, encoder: Callable[[], ChatEncoder]) -> Sequence[Document]:
    """The two answers of a line, each after the prompt."""
    found = parse_object(line)
    if missing := [answer for answer in ANSWERS if answer not in found]:
        raise InvalidRecordError(f"{' and '.join(missing)} missing; a pair has chosen and rejected")
    if isinstance(prompt := found.get("prompt"), str) and isinstance(found["chosen"], str):
        return [_document(tokenizer, prompt, string_value(found[answer], answer)) for answer in ANSWERS]
    return [encoder().document(chat) for chat in pair_of(found)]


def _document(tokenizer: Tokenizer, prompt: str, answer: str) -> Document:
    before = np.array([*tokenizer.begin, *tokenizer.encode(prompt)], np.int32)
    tokens = np.concatenate([before, tokenizer.encode(answer), np.array([tokenizer.end], np.int32)])
    return Document(tokens, np.arange(len(tokens)) >= max(len(before), 1), is_indivisible=True)
