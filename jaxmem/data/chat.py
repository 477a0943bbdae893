"""Conversations, one per line of JSONL, as tokens of which only the assistant's are trained on.

Three forms are recognized by their keys:

    {"messages": [{"role": "user", "content": "..."}, ...]}               OpenAI
    {"conversations": [{"from": "human", "value": "..."}, ...]}           ShareGPT
    {"instruction": "...", "input": "...", "output": "..."}               Alpaca

Which tokens are the assistant's follows from any template: rendered again with a placeholder instead of an answer,
everything but that answer is the same. The token that ends the assistant's turn is trained on too.

A conversation is never continued in the next row: one longer than a row is cut there, or dropped, and counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from jaxmem.config.sections import Data, Source
from jaxmem.data.chat_template import ChatTemplate, Message, TemplateError, template_for
from jaxmem.data.jsonl import JsonLines, parse_object, string_value
from jaxmem.data.records import EMPTY, Document, InvalidRecordError, RecordSource
from jaxmem.data.tokenizer import Tokenizer

LONGEST = 16 << 20  # bytes of a line
ROLES = {"human": "user", "gpt": "assistant", "bing": "assistant", "chatgpt": "assistant"}
PLACEHOLDER = "\ue000"  # a character that no language uses


def open_source(paths: Sequence[Path], source: Source, data: Data, tokenizer: Tokenizer) -> Conversations:  # noqa: ARG001
    return Conversations(paths, data, tokenizer, template_for(tokenizer, data.chat_template))


class JsonRecords(RecordSource):
    """Lines that are read as a whole, each one or several documents that are at most a row long."""

    def __init__(self, kind: str, paths: Sequence[Path], data: Data) -> None:
        super().__init__(kind, data)
        self._lines = JsonLines(paths, None, LONGEST)

    def __len__(self) -> int:
        return len(self._lines)

    def where(self, index: int) -> str:
        return self._lines.where(index)

    def close(self) -> None:
        self._lines.close()

    def parse(self, line: bytes) -> Sequence[Document]:
        raise NotImplementedError

    def is_usable(self, cut: Sequence[Document]) -> bool:  # noqa: ARG002
        """Whether these documents, cut to the length of a row, can be trained on."""
        return True

    def documents(self, index: int) -> Sequence[Document]:
        nothing = [EMPTY] * self.documents_per_record
        found = self.read_valid(index, lambda index: self.parse(self._lines.line(index)))
        if found is None:
            return nothing
        length = self._data.sequence_length
        cut = [_beginning(document, length) for document in found]
        excess = sum(max(0, len(document.tokens) - length) for document in found)
        if (excess and self._data.on_overlong == "drop") or not self.is_usable(cut):
            self.counts.dropped += 1
            return nothing
        self.counts.cut += excess > 0
        self.counts.tokens_cut += excess
        return cut


def _beginning(document: Document, length: int) -> Document:
    assert document.is_target is not None
    return Document(document.tokens[:length], document.is_target[:length], is_whole=True)


class Conversations(JsonRecords):
    """The conversations of JSONL files."""

    def __init__(self, paths: Sequence[Path], data: Data, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        super().__init__("conversations", paths, data)
        self._tokenizer, self._template = tokenizer, template

    def parse(self, line: bytes) -> Sequence[Document]:
        return [conversation(messages_of(line), self._tokenizer, self._template)]


def conversation(messages: Sequence[Message], tokenizer: Tokenizer, template: ChatTemplate, first: int = 0) -> Document:
    """The tokens of a conversation. Targets: what the assistant says from the message number `first` on."""
    for message in messages:
        for text in tokenizer.special:
            if text in message["content"]:
                raise InvalidRecordError(f"a message contains {text!r}, with which it could forge a turn")
    text = template.render(messages)
    ids, offsets = tokenizer.encode_with_offsets(text)
    is_target = np.zeros(len(ids), bool)
    for number, message in enumerate(messages):
        if number >= first and message["role"] == "assistant" and message["content"]:
            start, end = _answer_span(template, messages, number, text, tokenizer)
            is_target |= (offsets[:, 0] < end) & (offsets[:, 1] > start)
    if not is_target.any():
        raise InvalidRecordError("contains no answer of an assistant")
    return Document(ids, is_target, is_whole=True)


def _answer_span(
    template: ChatTemplate, messages: Sequence[Message], number: int, text: str, tokenizer: Tokenizer
) -> tuple[int, int]:
    """The characters of `text` from the beginning of an answer (right after the generation prompt) to the end of the
    token that ends its turn."""
    changed = template.render(
        [*messages[:number], {**messages[number], "content": PLACEHOLDER}, *messages[number + 1 :]]
    )
    start = _common_prefix(text, changed)
    end = len(text) - _common_prefix(text[start:][::-1], changed[start:][::-1])
    with suppress(TemplateError):  # of a template that refuses an unfinished conversation
        prompt = template.render(messages[:number], answer=True)
        start = len(prompt) if text.startswith(prompt) and len(prompt) < start else start
    after = text[end:]
    for special in tokenizer.special:
        if after.lstrip().startswith(special):
            return start, end + len(after) - len(after.lstrip()) + len(special)
    return start, end


def _common_prefix(one: str, other: str) -> int:
    """The number of characters that both begin with."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def messages_of(line: bytes) -> list[Message]:
    """The messages of a line in any of the three forms."""
    found = parse_object(line)
    if "messages" in found:
        messages = messages_from(found["messages"], "messages")
    elif "conversations" in found:
        messages = messages_from(found["conversations"], "conversations", "from", "value")
    elif "instruction" in found and "output" in found:
        prompt = [string_value(found[key], key) for key in ("instruction", "input") if found.get(key)]
        messages = [{"role": "user", "content": "\n\n".join(prompt)}]
        messages.append({"role": "assistant", "content": string_value(found["output"], "output")})
    else:
        fields = ", ".join(list(found)[:8])
        raise InvalidRecordError(f"no messages, conversations, or instruction and output; fields: {fields}")
    if isinstance(found.get("system"), str) and found["system"] and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": string_value(found["system"], "system")})
    return messages


def messages_from(value: Any, key: str, role: str = "role", content: str = "content") -> list[Message]:
    """The messages of a list, with the names of their keys."""
    if not isinstance(value, list) or not value:
        raise InvalidRecordError(f"{key!r} is not a list of messages")
    return [_message(one, role, content) for one in value]


def _message(found: Any, role: str, content: str) -> Message:
    if not isinstance(found, dict) or not isinstance(found.get(role), str) or content not in found:
        raise InvalidRecordError(f"a message needs {role!r} and {content!r}")
    text = found[content]
    if isinstance(text, list):  # parts, of which only text is supported
        parts = [one.get("text") if isinstance(one, dict) and one.get("type") == "text" else None for one in text]
        text = None if None in parts else "".join(map(str, parts))
    name = string_value(found[role], role)
    return {"role": ROLES.get(name, name), "content": string_value(text, content)}
