"""Conversations, one a line of JSONL, as tokens of which only the assistant's are learnt.

Three forms are known by their keys:

    {"messages": [{"role": "user", "content": "..."}, ...]}               OpenAI
    {"conversations": [{"from": "human", "value": "..."}, ...]}           ShareGPT
    {"instruction": "...", "input": "...", "output": "..."}               Alpaca

Which tokens the assistant says is found from the template alone, whatever it is: rendered once more with another text
in an answer's place, all but that answer stays the same. An answer is learnt with the token that ends its turn.

A conversation is never continued in the next row: what is longer than a row is cut there, or left out, and counted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from jaxmem.config.sections import Data
from jaxmem.data.jsonl import BYTE_ORDER_MARK, JsonLines
from jaxmem.data.long_line import BrokenLineError
from jaxmem.data.packing import Document
from jaxmem.data.template import ChatTemplate, Message, TemplateError
from jaxmem.data.tokenizer import Tokenizer
from jaxmem.errors import UserError

LONGEST = 16 << 20  # bytes of a line
ROLES = {"human": "user", "gpt": "assistant", "bing": "assistant", "chatgpt": "assistant", "tool": "tool"}
OTHER = "\ue000"  # a character that no language has, for another text in an answer's place


@dataclass
class Seen:
    """What became of the conversations that were read, each as often as it was."""

    kind: str = "conversations"
    read: int = 0
    broken: int = 0
    dropped: int = 0
    cut: int = 0
    tokens_cut: int = 0

    def __str__(self) -> str:
        told = [f"{self.cut} cut, {self.tokens_cut:,} tokens of them lost"] if self.cut else []
        told += [f"{self.dropped} dropped as too long"] if self.dropped else []
        told += [f"{self.broken} broken lines skipped"] if self.broken else []
        return f"of {self.read} {self.kind} read: {'; '.join(told)}" if told else ""


class Conversations:
    """The conversations of JSONL files."""

    blocks = None

    def __init__(self, paths: Sequence[Path], cfg: Data, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self._lines = JsonLines(paths, None, LONGEST)
        self._cfg, self._tokenizer, self._template = cfg, tokenizer, template
        self.seen = Seen()

    def __len__(self) -> int:
        return len(self._lines)

    def document(self, index: int) -> Document:
        """Its tokens, and which of them are learnt; none of a line that is skipped."""
        read = lambda line: conversation(messages_of(line), self._tokenizer, self._template)  # noqa: E731
        document = read_line(self._lines, index, self._cfg, self.seen, read)
        if document is None:
            return NOTHING
        more = len(document.tokens) - self._cfg.sequence_length
        if more <= 0:
            return document
        if self._cfg.on_overlong == "drop":
            self.seen.dropped += 1
            return NOTHING
        self.seen.cut += 1
        self.seen.tokens_cut += more
        assert document.learnt is not None
        return Document(document.tokens[:-more], document.learnt[:-more], whole=True)

    def close(self) -> None:
        self._lines.close()


NOTHING = Document(np.zeros(0, np.int32), np.zeros(0, bool), whole=True)
Read = TypeVar("Read")


def read_line(lines: JsonLines, index: int, cfg: Data, seen: Seen, read: Callable[[bytes], Read]) -> Read | None:
    """What a line holds; of one that is broken None, and it is counted, or the run stops with where it stands."""
    seen.read += 1
    try:
        return read(lines.line(index))
    except (BrokenLineError, TemplateError) as error:
        if cfg.on_invalid == "stop":
            raise UserError(f"{lines.where(index)}: {error} (data.on_invalid=skip passes over such lines)") from error
        seen.broken += 1
        return None


def conversation(messages: Sequence[Message], tokenizer: Tokenizer, template: ChatTemplate, since: int = 0) -> Document:
    """Tokens of a conversation, and which of them the assistant says, from the message of this number on."""
    for message in messages:
        for text in tokenizer.special:
            if text in message["content"]:
                raise BrokenLineError(f"a message holds {text!r}, with which it could forge a turn")
    text = template.render(messages)
    ids, places = tokenizer.encode_marked(text)
    learnt = np.zeros(len(ids), bool)
    for number, message in enumerate(messages):
        if number >= since and message["role"] == "assistant" and message["content"]:
            start, end = _answer(template, messages, number, text, tokenizer)
            learnt |= (places[:, 0] < end) & (places[:, 1] > start)
    if not learnt.any():
        raise BrokenLineError("no answer of an assistant is in it")
    return Document(ids, learnt, whole=True)


def _answer(
    template: ChatTemplate, messages: Sequence[Message], number: int, text: str, tokenizer: Tokenizer
) -> tuple[int, int]:
    """Where in the text an answer begins (right after what asks for it), and where the token that ends its turn is
    over."""
    others = [*messages]
    others[number] = {**messages[number], "content": OTHER}
    changed = template.render(others)
    start = _alike(text, changed)
    end = len(text) - _alike(text[start:][::-1], changed[start:][::-1])
    with suppress(TemplateError):  # of a template that wants more than what came before
        asked = template.render(messages[:number], answer=True)
        start = len(asked) if text.startswith(asked) and len(asked) < start else start
    after = text[end:]
    for special in tokenizer.special:
        if after.lstrip().startswith(special):
            return start, end + len(after) - len(after.lstrip()) + len(special)
    return start, end


def _alike(one: str, other: str) -> int:
    """How many characters both begin with."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def messages_of(line: bytes) -> list[Message]:
    """The messages of a line, in any of the three forms."""
    try:
        found = json.loads(line.removeprefix(BYTE_ORDER_MARK).decode())
    except (ValueError, RecursionError) as error:
        raise BrokenLineError(f"no valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise BrokenLineError(f"expected an object, found {type(found).__name__}")
    if "messages" in found:
        messages = messages_from(found["messages"], "messages")
    elif "conversations" in found:
        messages = messages_from(found["conversations"], "conversations", "from", "value")
    elif "instruction" in found and "output" in found:
        asked = [string(found[key], key) for key in ("instruction", "input") if found.get(key)]
        messages = [{"role": "user", "content": "\n\n".join(asked)}]
        messages.append({"role": "assistant", "content": string(found["output"], "output")})
    else:
        fields = ", ".join(list(found)[:8])
        raise BrokenLineError(f"no messages, conversations, or instruction and output; fields: {fields}")
    if isinstance(found.get("system"), str) and found["system"] and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": found["system"]})
    return messages


def messages_from(value: Any, key: str, role: str = "role", content: str = "content") -> list[Message]:
    if not isinstance(value, list) or not value:
        raise BrokenLineError(f"{key} is no list of messages")
    return [_message(one, role, content) for one in value]


def _message(given: Any, role: str, content: str) -> Message:
    if not isinstance(given, dict) or not isinstance(given.get(role), str) or content not in given:
        raise BrokenLineError(f"a message needs {role} and {content}")
    text = given[content]
    if isinstance(text, list):  # parts, of which text is the only kind that can be read here
        parts = [one.get("text") if isinstance(one, dict) and one.get("type") == "text" else None for one in text]
        text = None if None in parts else "".join(map(str, parts))
    name = string(given[role], role)
    return {"role": ROLES.get(name, name), "content": string(text, content)}


def string(value: Any, key: str) -> str:
    if not isinstance(value, str):
        raise BrokenLineError(f"{key} is not text")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair
        raise BrokenLineError(f"no valid text: {error}") from error
    return value
