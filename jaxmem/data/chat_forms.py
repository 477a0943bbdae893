"""Conversations and preferences as lines of JSON, in several common forms.

    {"messages": [{"role": "user", "content": "..."}, ...], "tools": [...]}            OpenAI, Hugging Face
    {"conversations": [{"from": "human", "value": "..."}, ...], "system": "..."}       ShareGPT
    {"instruction": "...", "input": "...", "output": "...", "history": [[...], ...]}   Alpaca
    {"prompt": ..., "completion": ...}                                                 TRL; texts or lists of messages

A preference has `chosen` and `rejected`, instead of `output` or `completion`, or in addition to `messages` or
`conversations`. Each is a text, a message, or a list of messages.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxmem.data.chat_template import Message
from jaxmem.data.jsonl import parse_json, string_value
from jaxmem.data.records import InvalidRecordError
from jaxmem.errors import as_yaml
from jaxmem.typing import JsonDict

KEYS = {"from": "role", "value": "content"}  # keys of a message in ShareGPT's form, and in OpenAI's
ROLES = {"human": "user", "gpt": "assistant", "bing": "assistant", "chatgpt": "assistant", "observation": "tool"}
LISTS = ("messages", "conversations")
TEXTS = ("prompt", "instruction", "input")  # keys whose texts are the user's message
ANSWERS = ("output", "completion")
REASONING = ("reasoning_content", "thinking", "reasoning")


@dataclass(frozen=True)
class Chat:
    """A conversation. `targets`: the indices of the messages to train on. `options`: further template arguments."""

    messages: Sequence[Message]
    targets: frozenset[int]
    tools: Sequence[Any] | None = None
    options: JsonDict = field(default_factory=dict)

    def strings(self) -> Iterator[str]:
        """All texts that the template can write."""
        left: list[Any] = [self.messages, self.tools, self.options]
        while left:
            match left.pop():
                case str() as text:
                    yield text
                case dict() as value:
                    left += [*value, *value.values()]
                case list() as value:
                    left += value


def chat_of(record: JsonDict) -> Chat:
    """The conversation of a line."""
    messages = _prompt_of(record)
    start = 0
    if not any(key in record for key in LISTS):
        start = len(messages) if isinstance(record.get("prompt"), list) else 0
        messages += [message for key in ANSWERS if key in record for message in _answer_of(record, key)]
    if not messages:
        fields = ", ".join(list(record)[:8])
        raise InvalidRecordError(f"expected messages, conversations, or instruction and output; found {fields}")
    return _chat(messages, record, start)


def pair_of(record: JsonDict) -> tuple[Chat, Chat]:
    """The chosen and the rejected conversation of a line. Targets are the answers after the prompt or, without a
    prompt, from the first message that differs."""
    before = _prompt_of(record)
    chosen, rejected = (_answer_of(record, key) for key in ("chosen", "rejected"))
    if chosen == rejected:
        raise InvalidRecordError("chosen and rejected are equal; remove the pair")
    if before[:1] == chosen[:1] == rejected[:1]:  # the answers contain the prompt
        before = []
    same = (n for n, (message, other) in enumerate(zip(chosen, rejected, strict=False)) if message != other)
    start = len(before) or next(same, min(len(chosen), len(rejected)))
    return _chat([*before, *chosen], record, start), _chat([*before, *rejected], record, start)


def _chat(messages: list[Message], record: JsonDict, start: int) -> Chat:
    """A conversation. `start`: the index of the first message that may be a target."""
    if record.get("system") and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": string_value(record["system"], "system")}, *messages]
        start += start > 0
    targets = set()
    plain = []
    for number, message in enumerate(messages):
        weight = message.get("weight", 1)
        if weight not in (0, 1):
            raise InvalidRecordError(f"weight={as_yaml(weight)} of a message is not supported; use 0 or 1")
        if message["role"] == "assistant" and weight and number >= start:
            targets.add(number)
        plain.append({key: value for key, value in message.items() if key != "weight"})
    if not targets:
        raise InvalidRecordError("the conversation has no assistant message to train on; add one")
    tools = _parsed(record.get("tools") or None) or None  # "[]" too: a template may announce an empty list
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise InvalidRecordError("tools must be a list of JSON objects")
    options = record.get("chat_template_kwargs") or {}
    if not isinstance(options, dict):
        raise InvalidRecordError("chat_template_kwargs must be a JSON object")
    return Chat(plain, frozenset(targets), tools, options)


def _prompt_of(record: JsonDict) -> list[Message]:
    """The messages of a record before its answer."""
    for key in (*LISTS, "prompt"):
        if key in record and (key in LISTS or isinstance(record[key], list)):
            return messages_of(record[key], key)
    turns = record.get("history") or []
    if not isinstance(turns, list) or not all(isinstance(turn, list) and len(turn) == 2 for turn in turns):
        raise InvalidRecordError("history must be a list of pairs [instruction, answer]")
    texts = [(role, text) for turn in turns for role, text in zip(("user", "assistant"), turn, strict=True)]
    if prompt := [string_value(record[key], key) for key in TEXTS if record.get(key)]:
        texts.append(("user", "\n\n".join(prompt)))
    return [{"role": role, "content": string_value(text, "history")} for role, text in texts]


def _answer_of(record: JsonDict, key: str) -> list[Message]:
    value = record[key]
    if isinstance(value, list):
        return messages_of(value, key)
    if isinstance(value, dict):
        return [_message(value, key)]
    return [{"role": "assistant", "content": string_value(value, key)}]


def messages_of(value: object, key: str) -> list[Message]:
    """The messages of a list."""
    if not isinstance(value, list) or not value:
        raise InvalidRecordError(f"{key} must be a list of messages")
    return [_message(message, key) for message in value]


def _message(record: object, key: str) -> Message:
    """A message under OpenAI's names, without fields that are null."""
    if not isinstance(record, dict):
        raise InvalidRecordError(f"{key} must contain messages, not {as_yaml(record)[:60]}")
    message: JsonDict = {KEYS.get(name) or name: value for name, value in record.items() if value is not None}
    if not isinstance(role := message.get("role"), str):
        raise InvalidRecordError("a message must have the key role (or from) with a string")
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(map(_part, content))
    elif role == "function_call":
        calls = _parsed(content)
        message["tool_calls"] = calls if isinstance(calls, list) else [calls]
        role = "assistant"
        content = None
    message |= {"role": ROLES.get(role, role), "content": content}
    if calls := message.pop("tool_calls", None):
        message["tool_calls"] = _calls(calls)
    elif content is None:
        raise InvalidRecordError("a message must have the key content (or value)")
    elif message["role"] != "tool":  # the result of a tool may be any object
        string_value(content, "content")
    if reasoning := next((message[name] for name in REASONING if name in message), None):
        string_value(reasoning, "reasoning_content")
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}  # as in transformers
    return message


def _part(part: object) -> str:
    if not isinstance(part, dict) or part.get("type") != "text":
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        raise InvalidRecordError(f"content of type {kind} is not supported; use type text")
    return string_value(part.get("text"), "text")


def _calls(calls: object) -> list[JsonDict]:
    """Tool calls with their arguments as objects, as templates expect them; OpenAI writes these as text."""
    if not isinstance(calls, list):
        raise InvalidRecordError("tool_calls must be a list")
    parsed_calls = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidRecordError("a tool call must have function.name")
        fields = call if "function" in call else {"type": "function"}
        parsed_calls.append({**fields, "function": {**function, "arguments": _parsed(function.get("arguments") or {})}})
    return parsed_calls


def _parsed(value: object) -> Any:
    """The value of a text in JSON; other values are unchanged."""
    return parse_json(value) if isinstance(value, str) else value
