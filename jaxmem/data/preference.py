"""Pairs of answers to the same prompt, of which one was preferred: lines of JSONL.

    {"prompt": "...", "chosen": "...", "rejected": "..."}
    {"prompt": [messages], "chosen": [messages], "rejected": [messages]}

Without a prompt, messages begin to be compared where the two are no longer alike. Texts are tokenized as a document is,
messages by the chat template. Learnt is what an answer says, with the token that ends it; of messages those that the
assistant says after the prompt. A row of a batch holds one answer behind its prompt, and rows 2 i and 2 i + 1 the two
of a pair. A pair that is broken, or of which nothing is left to learn, is two rows of padding: it counts nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxmem.config.sections import Data
from jaxmem.data.chat import LONGEST, NOTHING, Seen, conversation, messages_from, read_line, string
from jaxmem.data.jsonl import BYTE_ORDER_MARK, JsonLines
from jaxmem.data.long_line import BrokenLineError
from jaxmem.data.packing import Batch, Document, TextRows
from jaxmem.data.template import ChatTemplate, Message
from jaxmem.data.tokenizer import Tokenizer

ANSWERS = ("chosen", "rejected")
Pair = tuple[Document, Document]
Told = str | list[Message]  # a text, or messages


class Preferences:
    """The pairs of JSONL files."""

    blocks = None

    def __init__(
        self, paths: Sequence[Path], cfg: Data, tokenizer: Tokenizer, template: Callable[[], ChatTemplate]
    ) -> None:
        """`template` is asked for where there are messages."""
        self._lines = JsonLines(paths, None, LONGEST)
        self._cfg, self._tokenizer, self._template = cfg, tokenizer, template
        self._last: tuple[int, Pair] | None = None
        self.seen = Seen("pairs")

    def __len__(self) -> int:
        return len(self._lines)

    def document(self, index: int, answer: int) -> Document:
        """One of the two, as a row is made of it."""
        if self._last is None or self._last[0] != index:  # the other row of the pair asks next
            self._last = index, self._pair(index)
        return self._last[1][answer]

    def _pair(self, index: int) -> Pair:
        read = lambda line: pair(line, self._tokenizer, self._template)  # noqa: E731
        found = read_line(self._lines, index, self._cfg, self.seen, read)
        if found is None:
            return NOTHING, NOTHING
        first, second = found
        length = self._cfg.sequence_length
        more = [max(0, len(one.tokens) - length) for one in (first, second)]
        cut = _cut(first, length), _cut(second, length)
        if (any(more) and self._cfg.on_overlong == "drop") or not all(_learnt(one).any() for one in cut):
            self.seen.dropped += 1
            return NOTHING, NOTHING
        if any(more):
            self.seen.cut += 1
            self.seen.tokens_cut += sum(more)
        return cut

    def close(self) -> None:
        self._lines.close()


def pair(line: bytes, tokenizer: Tokenizer, template: Callable[[], ChatTemplate]) -> Pair:
    """The two answers of a line, each behind the prompt."""
    try:
        found = json.loads(line.removeprefix(BYTE_ORDER_MARK).decode())
    except (ValueError, RecursionError) as error:
        raise BrokenLineError(f"no valid JSON: {error}") from error
    if not isinstance(found, dict) or any(answer not in found for answer in ANSWERS):
        raise BrokenLineError("no object with chosen and rejected")
    answers = [found[answer] for answer in ANSWERS]
    if all(isinstance(answer, list) for answer in answers):
        return _of_messages(found.get("prompt"), answers, tokenizer, template())
    prompt = string(found.get("prompt"), "prompt")
    texts = [string(value, answer) for answer, value in zip(ANSWERS, answers, strict=True)]
    before = np.array([*tokenizer.begin, *tokenizer.encode(prompt)], np.int32)

    def one(text: str) -> Document:
        tokens = np.concatenate([before, tokenizer.encode(text), np.array([tokenizer.end], np.int32)])
        return Document(tokens, np.arange(len(tokens)) >= max(len(before), 1), whole=True)

    return one(texts[0]), one(texts[1])


def _of_messages(given: Any, answers: list[Any], tokenizer: Tokenizer, template: ChatTemplate) -> Pair:
    asked = [] if given is None else messages_from(given, "prompt") if isinstance(given, list) else _asked(given)
    first, second = ([*asked, *messages_from(said, answer)] for answer, said in zip(ANSWERS, answers, strict=True))
    shared = next((n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), None)
    since = len(asked) or shared
    if since is None:
        raise BrokenLineError("chosen and rejected are the same")
    return conversation(first, tokenizer, template, since), conversation(second, tokenizer, template, since)


def _asked(given: Any) -> list[Message]:
    return [{"role": "user", "content": string(given, "prompt")}]


def _cut(document: Document, length: int) -> Document:
    return Document(document.tokens[:length], _learnt(document)[:length], whole=True)


def _learnt(document: Document) -> np.ndarray:
    assert document.learnt is not None
    return document.learnt


class PairRows(TextRows):
    """Rows of pairs, with what the reference gives each answer: `references` [pairs, 2]."""

    def __init__(
        self,
        read: Callable[[int, int], Document],
        references: Callable[[int], np.ndarray],
        rows: np.ndarray,
        stride: int,
        pairs: int,
        time: int,
    ) -> None:
        """`read` and `references` of a place in the order of pairs, and `read` of one of its answers."""
        super().__init__(lambda place: read(*divmod(place, 2)), rows, stride, 2 * pairs, time, packing=False)
        self._references, self._rows, self._stride, self._places = references, rows, stride, 2 * pairs

    def batch(self) -> Batch:
        places = [row + record * self._stride for row, record, _ in self.place["rows"]]
        found = [self._references(place // 2)[place % 2] if place < self._places else 0.0 for place in places]
        return super().batch() | {"reference": np.array(found, np.float32).reshape(self._rows.shape)}
