"""Conversations, one per line of JSONL (see `chat_forms`), as tokens. Only tokens of the assistant are targets.

If a template marks the answers of the assistant (`{% generation %}`), the tokens inside these marks are the targets,
as in transformers. Otherwise the conversation is rendered a second time with a placeholder instead of an answer; the
text that differs is the target. The token that ends the assistant's turn is a target too.

A conversation is never continued in the next row: a conversation longer than a row is cut or dropped, and counted.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property

import numpy as np

from jaxmem.data.chat_forms import REASONING, Chat, chat_of, pair_of
from jaxmem.data.chat_template import ChatTemplate, Message, Rendered, TemplateError, template_for
from jaxmem.data.jsonl import JsonRecords, string_value
from jaxmem.data.records import EMPTY, Document, InvalidRecordError
from jaxmem.data.tokenizer import Tokenizer
from jaxmem.typing import JsonDict

PLACEHOLDERS = "".join(map(chr, range(0xE000, 0xF900)))  # characters that no language uses
TOOL_CALL_FIELDS = ("tool_calls", "function_call")  # fields without which a message loses its meaning
FIELDS_WITHOUT_WARNING = ("role", "content", "tool_call_id")  # that the template need not read
PROMPT_SUFFIX_LENGTH = 8  # characters before an answer that identify the end of the generation prompt
MAX_FIELD_WARNINGS = 8  # largest number of fields with a warning
ONLY_OF_TEMPLATES = ("system", "history", "tools", "chat_template_kwargs")  # keys without effect on pairs of texts
PAIR = ("chosen", "rejected")


class ChatRecords(JsonRecords):
    """Records that are one or several documents, each at most a row long."""

    @cached_property
    def _encoder(self) -> ChatEncoder:  # opened when it is needed: pairs of texts need no template
        return ChatEncoder(self.tokenizer, template_for(self.tokenizer, self.data.chat_template))

    def parse(self, record: JsonDict) -> Sequence[Document]:
        raise NotImplementedError

    def documents(self, index: int) -> Sequence[Document]:
        nothing = [EMPTY] * self.documents_per_record
        documents = self.read_valid(index, lambda index: self.parse(self.rows.record(index)))
        if documents is None:
            return nothing
        length = self.data.sequence_length
        cut = [_beginning(document, length) for document in documents]
        excess = sum(max(0, len(document.tokens) - length) for document in documents)
        if excess and (
            self.data.on_overlong == "drop" or not all(np.any(document_cut.is_target) for document_cut in cut)
        ):
            self.counts.dropped += 1
            return nothing
        self.counts.cut += excess > 0
        self.counts.tokens_cut += excess
        return cut


def _beginning(document: Document, length: int) -> Document:
    assert document.is_target is not None
    return Document(document.tokens[:length], document.is_target[:length], is_indivisible=True)


class Conversations(ChatRecords):
    """The conversations of JSONL files."""

    noun = "conversations"

    def parse(self, record: JsonDict) -> Sequence[Document]:
        return [self._encoder.document(chat_of(record))]


class Preferences(ChatRecords):
    """Pairs of answers to the same prompt, one of which is preferred, as lines of JSONL.

        {"prompt": "...", "chosen": "...", "rejected": "..."}
        {"prompt": [messages], "chosen": [messages], "rejected": [messages]}      and the other forms of `chat_forms`

    Strings are tokenized like documents, lists of messages by the chat template. Targets are the tokens of an answer
    and the token that ends it. A row of a batch is a prompt and one answer; rows 2 i and 2 i + 1 are a pair. A
    pair that is skipped is two rows of padding, which do not contribute to the loss.
    """

    noun = "pairs"
    documents_per_record = 2

    _last: tuple[int, Sequence[Document]] | None = None

    def documents(self, index: int) -> Sequence[Document]:
        last = self._last  # read once: another loader may replace it meanwhile
        if last is None or last[0] != index:  # the other row of the pair needs the same record
            last = index, super().documents(index)
            self._last = last
        return last[1]

    def parse(self, record: JsonDict) -> Sequence[Document]:
        """The two answers of a record, each after the prompt."""
        if missing := [answer for answer in PAIR if answer not in record]:
            raise InvalidRecordError(f"{' and '.join(missing)} missing; write both keys, chosen and rejected")
        prompt = record.get("prompt")
        if isinstance(prompt, str) and isinstance(record["chosen"], str):
            if unread := [key for key in ONLY_OF_TEMPLATES if record.get(key)]:
                raise InvalidRecordError(
                    f"{unread[0]} has no effect with a prompt that is text; write the prompt as a list of messages"
                )
            return [self._document(prompt, string_value(record[answer], answer)) for answer in PAIR]
        return [self._encoder.document(chat) for chat in pair_of(record)]

    def _document(self, prompt: str, answer: str) -> Document:
        tokenizer = self.tokenizer
        before = np.array([*tokenizer.begin, *tokenizer.encode(prompt)], np.int32)
        tokens = np.concatenate([before, tokenizer.encode(answer), np.array([tokenizer.end], np.int32)])
        return Document(tokens, np.arange(len(tokens)) >= max(len(before), 1), is_indivisible=True)


class ChatEncoder:
    """Converts conversations to tokens, with a chat template."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._special = re.compile("|".join(map(re.escape, sorted(tokenizer.special, reverse=True))) or r"(?!)")
        self._named: set[str] = set()

    def document(self, chat: Chat) -> Document:
        """The tokens of a conversation; targets are the tokens of the assistant's messages."""
        self._check(chat)
        text, marks = self._render(chat, chat.messages)
        if marks is None:
            spans = [self._answer_span(chat, number, text) for number in sorted(chat.targets)]
        else:
            roles = enumerate(message["role"] for message in chat.messages)
            others = [number for number, role in roles if role == "assistant" and number not in chat.targets]
            excluded = [self._answer_span(chat, number, text) for number in others]
            spans = [(a, b) for a, b in marks if not any(start < b and a < end for start, end in excluded)]
        ids, offsets = self._tokenizer.encode_with_offsets(text)
        is_target = np.zeros(len(ids), bool)
        # A special token may include the spaces after it, and so the first ones of an answer.
        is_header = np.isin(ids, [*self._tokenizer.special.values()])
        for start, end in spans:
            is_before = is_header & (offsets[:, 0] < start)
            inside = np.flatnonzero((offsets[:, 0] < end) & (offsets[:, 1] > start) & ~is_before)
            is_target[inside.min(initial=len(ids)) : inside.max(initial=-1) + 1] = True
        if not is_target.any():
            raise InvalidRecordError(
                "the chat template renders no assistant message to train on; use another data.chat_template"
            )
        if not np.isin(ids[is_target], [*self._tokenizer.special.values()]).any():
            self._warn(
                "end",
                "the chat template writes no end token after an answer, so the model would not stop; use one that does",
            )
        return Document(ids, is_target, is_indivisible=True)

    def _render(self, chat: Chat, messages: Sequence[Message], *, answer: bool = False) -> Rendered:
        return self._template.render(messages, chat.tools, answer=answer, **chat.options)

    def _check(self, chat: Chat) -> None:
        """No text may contain a special token, and the template should read every field."""
        for text in chat.strings():
            if match := self._special.search(text):
                raise InvalidRecordError(
                    f"a message contains the special token {match[0]}, which could forge a turn; "
                    "remove the token from the message"
                )
        source = self._template.source
        fields = {field for message in chat.messages for field in message} | ({"tools"} if chat.tools else set())
        # A message with reasoning contains it under several names; only the first is checked.
        fields -= {*FIELDS_WITHOUT_WARNING, *REASONING[1:]}
        if any(name in source for name in REASONING):
            fields.discard(REASONING[0])
        for field in sorted(field for field in fields if field not in source):
            if field in TOOL_CALL_FIELDS:
                raise InvalidRecordError(f"the chat template does not support {field}; use another data.chat_template")
            self._warn(field, f"the key {field} has no effect: the chat template does not read it")

    def _warn(self, about: str, text: str) -> None:
        """Warns once about each subject."""
        if about not in self._named and len(self._named) < MAX_FIELD_WARNINGS:
            self._named.add(about)
            warnings.warn(f"conversations: {text}", stacklevel=2)

    def _answer_span(self, chat: Chat, number: int, text: str) -> tuple[int, int]:
        """The characters of `text` from the beginning of an answer (right after the generation prompt) to the end of
        the token that ends its turn."""
        start, end = self._changed_span(chat, number, text)
        with suppress(TemplateError):  # a template may refuse an unfinished conversation
            earlier = chat.messages[:number]
            prompt, _ = self._render(chat, earlier, answer=True)
            before = text[:start].rstrip()
            if text.startswith(prompt):
                start = min(start, len(prompt))
            # In the other cases, earlier text differs from that of the prompt.
            elif (lead := self._lead(chat, number, prompt)) and text.endswith(lead, 0, start):
                start -= len(lead)
            elif prompt.endswith(before[-PROMPT_SUFFIX_LENGTH:]):
                start = len(before)
            else:  # other text of the answer comes first
                header = prompt[_common_prefix(prompt, self._render(chat, earlier).text) :].rstrip()
                previous_end = self._changed_span(chat, number - 1, text)[1] if number else 0
                if header and (header_start := text.rfind(header, previous_end, start)) >= 0:
                    start = header_start + len(header)
        after = len(text) - len(text[end:].lstrip())
        following = self._special.match(text, after)
        if following is None:  # the rest of a tool call is in between
            is_last = number + 1 == len(chat.messages)
            next_text = len(text) if is_last else self._changed_span(chat, number + 1, text)[0]
            following = self._special.search(text, end, next_text)
        return start, following.end() if following else end

    def _lead(self, chat: Chat, number: int, prompt: str) -> str:
        """The text between the generation prompt and the content of an answer, such as the beginning of a tool call, if
        the conversation ends with this answer; empty if it does not begin with the prompt."""
        ending = replace(chat, messages=chat.messages[: number + 1])
        text = self._render(ending, ending.messages).text
        start, _ = self._changed_span(ending, number, text)
        return text[len(prompt) : start] if text.startswith(prompt) else ""

    def _changed_span(self, chat: Chat, number: int, text: str) -> tuple[int, int]:
        """The characters of `text` that depend on the content of a message."""
        used = set("".join(chat.strings()))
        placeholder = next(character for character in PLACEHOLDERS if character not in used)

        def changed(*, names: bool) -> str:
            message = _replaced(chat.messages[number], placeholder, names=names)
            return self._render(chat, [*chat.messages[:number], message, *chat.messages[number + 1 :]]).text

        with_names = changed(names=True)
        start = _common_prefix(text, with_names)
        # The header of a result may have the name of the function, which then is not a part of this message.
        other = changed(names=False) if "tool_calls" in chat.messages[number] else with_names
        return start, len(text) - _common_prefix(text[start:][::-1], other[start:][::-1])


def _replaced(message: Message, placeholder: str, *, names: bool) -> Message:
    """The message with a placeholder instead of its content. `names`: also instead of the names of functions."""
    changed = {**message, **{name: placeholder for name in REASONING if name in message}}
    if "tool_calls" not in message or message.get("content"):  # a template may refuse content in addition to calls
        changed["content"] = placeholder
    if "tool_calls" in message:
        calls = message["tool_calls"]
        placeholders = {"arguments": {placeholder: placeholder}, **({"name": placeholder} if names else {})}
        changed["tool_calls"] = [{**call, "function": {**call["function"], **placeholders}} for call in calls]
    return changed


def _common_prefix(left: str, right: str) -> int:
    """The length of the common prefix of two texts, by bisection: Python compares slices faster than characters."""
    low = 0
    high = min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def end_of_answer(tokenizer: Tokenizer, template: ChatTemplate) -> frozenset[int]:
    """The special token that a template writes after an answer; empty if it writes none. A model that was trained on
    conversations ends its answers with it, also if it is not the end-of-document token."""
    mark = PLACEHOLDERS[0]
    try:
        text = template.render([{"role": "user", "content": "a"}, {"role": "assistant", "content": mark}]).text
    except TemplateError:  # a template may refuse a conversation without other messages
        return frozenset()
    after = text.partition(mark)[2].lstrip()
    longest_first = sorted(tokenizer.special, key=len, reverse=True)
    return frozenset([tokenizer.special[name] for name in longest_first if after.startswith(name)][:1])
