"""Pairs of answers: both forms, what is trained on, what is cut, and lines that are no pair."""

import json
from pathlib import Path

import numpy as np
import pytest

from jaxmem.data.chat import ChatEncoder, Preferences
from jaxmem.data.chat_template import ChatTemplate
from jaxmem.data.jsonl import parse_object
from jaxmem.data.records import InvalidRecordError
from jaxmem.data.tokenizer import END_TEXT, Bytes
from jaxmem.errors import UserError
from tests.support.records import open_records

TEXT = {"prompt": "ab", "chosen": "cde", "rejected": "f"}


def encoder() -> ChatEncoder:
    source = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}{{ eos_token }}{% endfor %}"
    source += "{% if add_generation_prompt %}a:{% endif %}"
    return ChatEncoder(Bytes(), ChatTemplate(source, "test", {"eos_token": END_TEXT}))


@pytest.fixture
def pairs(tmp_path: Path) -> Preferences:
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps(TEXT))
    records = open_records(Preferences, [file])
    records._encoder = encoder()
    return records


def message_of(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def targets_of(pairs: Preferences, line: object) -> list[tuple[str, str]]:
    """Of each answer the whole text, and what of it is learnt; `|` is the end."""
    found = pairs.parse(parse_object(json.dumps(line).encode()))

    def spelt(ids: np.ndarray) -> str:
        return "".join("|" if i == 256 else chr(i) for i in ids)

    return [(spelt(one.tokens), spelt(one.tokens[one.is_target])) for one in found]


def test_texts_and_messages(pairs: Preferences) -> None:
    assert targets_of(pairs, TEXT) == [("abcde|", "cde|"), ("abf|", "f|")]
    answers = {"chosen": [message_of("assistant", "yes")], "rejected": [message_of("assistant", "no")]}
    prompt = [message_of("user", "u"), message_of("assistant", "x"), message_of("user", "v")]
    expected = [("u:u|a:x|u:v|a:yes|", "yes|"), ("u:u|a:x|u:v|a:no|", "no|")]
    assert targets_of(pairs, {"prompt": prompt, **answers}) == expected
    assert targets_of(pairs, {name: prompt + answer for name, answer in answers.items()}) == expected
    expected = [("u:u|a:yes|", "yes|"), ("u:u|a:no|", "no|")]
    assert targets_of(pairs, {"prompt": "u", **answers}) == expected
    complete = {name: [message_of("user", "u"), *answer] for name, answer in answers.items()}
    assert targets_of(pairs, {"prompt": "u", "messages": complete["chosen"], **complete}) == expected
    sharegpt = {name: {"from": "gpt", "value": answer[0]["content"]} for name, answer in answers.items()}
    assert targets_of(pairs, {"conversations": [{"from": "human", "value": "u"}], **sharegpt}) == expected
    assert targets_of(pairs, {"instruction": "u", "chosen": "yes", "rejected": "no"}) == expected


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ([], "must be a JSON object, not \\[\\]"),
        ({"prompt": "a", "chosen": "b"}, "rejected missing"),
        ({**TEXT, "prompt": 1}, "prompt must be a string"),
        ({**TEXT, "system": "Be brief."}, "system has no effect with a prompt that is text"),
        ({**TEXT, "rejected": ["x"]}, "rejected must be a string"),
        ({"chosen": [message_of("assistant", "a")], "rejected": [message_of("assistant", "a")]}, "are equal"),
        (
            {"prompt": "u", "chosen": [message_of("user", "a")], "rejected": [message_of("user", "b")]},
            "no assistant message",
        ),
        ({"prompt": "u", "chosen": [{"role": 1}], "rejected": []}, "must have the key role"),
    ],
)
def test_invalid_pairs(pairs: Preferences, line: object, message: str) -> None:
    with pytest.raises(InvalidRecordError, match=message):
        pairs.parse(parse_object(json.dumps(line).encode()))


def test_what_is_too_long_or_broken_is_counted_and_both_answers_go_together(tmp_path) -> None:
    file = tmp_path / "pairs.jsonl"
    lines = [TEXT, {**TEXT, "rejected": "f" * 9}, {**TEXT, "prompt": "p" * 8}]
    file.write_text("\n".join([*map(json.dumps, lines), "{"]) + "\n")

    def preferences(**settings: object) -> Preferences:
        records = open_records(Preferences, [file], sequence_length=6, **settings)
        records._encoder = encoder()
        return records

    def read(**settings: object) -> tuple[list[list[int]], str]:
        records = preferences(on_invalid="skip", **settings)
        found = [[len(records.documents(index)[answer].tokens) for answer in (0, 1)] for index in range(len(records))]
        return found, str(records.counts)

    cut = "of 4 pairs read: 1 cut, 6 of their tokens lost; 1 dropped as too long; 1 invalid ones skipped"
    assert read() == ([[6, 4], [6, 6], [0, 0], [0, 0]], cut)
    dropped = "of 4 pairs read: 2 dropped as too long; 1 invalid ones skipped"
    assert read(on_overlong="drop") == ([[6, 4], [0, 0], [0, 0], [0, 0]], dropped)
    with pytest.raises(UserError, match=r"pairs.jsonl, line 4: invalid JSON.*data.on_invalid=skip"):
        preferences().documents(3)
