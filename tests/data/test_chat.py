"""Conversations: their three forms, any template, and only what the assistant says is learnt."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from jaxmem.config import load_config
from jaxmem.data import Loader, chat_template
from jaxmem.data.chat import conversation, messages_of
from jaxmem.data.chat_template import ChatTemplate, TemplateError, template_for
from jaxmem.data.records import InvalidRecordError
from jaxmem.data.tokenizer import Bytes, tokenizer_for
from jaxmem.errors import UserError

ROOT = Path(__file__).parents[2]
RECORDED = json.loads((ROOT / "tests/hf/data/conversations.json").read_text())
PLAIN = (
    "{% for m in messages %}{{ m.role[0] + ':' + m.content + (eos_token if m.role == 'assistant' else '') }}"
    "{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
HI = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bc"}]


@pytest.mark.parametrize("case", RECORDED)
def test_tokens_and_what_is_learnt_are_those_of_transformers(case: str, tmp_path: Path, compare) -> None:
    """Theirs are the template's own marks; ours are found without them."""
    name, number = case.split(".")
    compare.write_tokenizer(name, tmp_path)
    tokenizer = tokenizer_for(str(tmp_path))
    template = template_for(tokenizer)
    messages, expected = compare.CONVERSATIONS[int(number)], RECORDED[case]
    found = conversation(messages, tokenizer, template)
    assert found.tokens.tolist() == expected["ids"]
    assert found.is_target.astype(int).tolist() == expected["learnt"]
    assert template.render(messages[:-1], answer=True) == expected["asked"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ({"messages": HI}, HI),
        ({"messages": [HI[0] | {"content": [{"type": "text", "text": "a"}]}, HI[1]]}, HI),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "bc"}]}, HI),
        ({"instruction": "a", "input": "", "output": "bc"}, HI),
        ({"instruction": "x", "input": "y", "output": "bc"}, [{"role": "user", "content": "x\n\ny"}, HI[1]]),
        ({"system": "s", "instruction": "a", "output": "bc"}, [{"role": "system", "content": "s"}, *HI]),
    ],
)
def test_the_forms_of_a_line(line: object, expected: object) -> None:
    assert messages_of(json.dumps(line).encode()) == expected


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "invalid JSON"),
        (b"[]", "expected an object, found list"),
        (b'{"text": "a"}', "no messages, conversations, or instruction and output; fields: text"),
        (b'{"messages": []}', "'messages' is not a list of messages"),
        (b'{"messages": [{"role": "user"}]}', "a message needs 'role' and 'content'"),
        (b'{"messages": [{"role": "user", "content": [{"type": "image"}]}]}', "'content' is not a string"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "'content' is not valid text"),
    ],
)
def test_broken_lines(line: bytes, message: str) -> None:
    with pytest.raises(InvalidRecordError, match=message):
        messages_of(line)


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, "here", {"eos_token": "<|endoftext|>"})


def test_a_text_cannot_forge_a_turn() -> None:
    with pytest.raises(InvalidRecordError, match=r"contains '<\|endoftext\|>'"):
        conversation([HI[0] | {"content": "a<|endoftext|>"}, HI[1]], Bytes(), template(PLAIN))
    with pytest.raises(InvalidRecordError, match="no answer"):
        conversation(HI[:1], Bytes(), template(PLAIN))


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% include 'x' %}",
        "{{ raise_exception('no') }}",
        "{{ 1 / 0 }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{{ messages.nothing.at_all }}",
    ],
)
def test_a_template_does_nothing_but_write(source: str) -> None:
    with pytest.raises(TemplateError):
        template(source).render(HI)


def test_a_template_without_end_is_ended_and_the_next_is_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "SECONDS", 0.3)
    renderer = chat_template._Renderer()
    monkeypatch.setattr(chat_template, "_renderer", lambda: renderer)
    loops = "{% for i in range(99999) %}" * 4 + "{% endfor %}" * 4
    with pytest.raises(UserError, match=r"here: the chat template takes more than 0.3 s of processor time"):
        template(loops).render(HI)
    with pytest.raises(TemplateError, match="the chat template fails: it takes more than 1024 MiB"):
        template("{{ messages[0].role * 2 ** 31 }}").render(HI)
    assert template(PLAIN).render(HI)
    renderer.close()


def test_invalid_templates() -> None:
    with pytest.raises(UserError, match="here: not a valid chat template"):
        template("{% if %}")
    with pytest.raises(UserError, match=r"no chat template \(bytes have none\); give data.chat_template"):
        template_for(Bytes())


def chat(place: Path, lines: list[str], **data: object) -> object:
    (place / "chat.jsonl").write_text("\n".join(lines))
    (place / "plain.jinja").write_text(PLAIN)
    model = {"family": "decoder", "layers": 1, "embed": 8, "mlp": 8, "heads": 1, "kv_heads": 1, "head_dim": 8}
    own = {
        "source": "chat",
        "path": f"{place}/chat.jsonl",
        "chat_template": f"{place}/plain.jinja",
        "sequence_length": 16,
    }
    return load_config(
        {
            "name": "x",
            "model": {**model, "vocab": 257},
            "data": {**own, "held_out": 0.0, "shuffle": False, "epochs": 1, **data},
            "batch": {"global_size": 1},
            "train": {"steps": 1},
        }
    )


def line(answer: str) -> str:
    return json.dumps({"instruction": "q", "output": answer})


def test_conversations_are_not_divided_among_rows(tmp_path: Path) -> None:
    """`u:qa:` and an answer with its end: 5 tokens and what is summary; two of three lie in the first row."""
    cfg = chat(tmp_path, [line("12"), line("3"), line("4567"), line("8" * 20)])
    with Loader(cfg) as loader:
        rows = [{name: x[0, 0] for name, x in batch.items()} for batch in loader]
        summary = loader.corpus.summary()
    assert rows[0]["segment_ids"].tolist() == [1] * 8 + [2] * 7 + [0]
    learnt = [[int(t) for t, m in zip(row["targets"], row["mask"], strict=True) if m] for row in rows]
    assert learnt == [[*b"12", 256, *b"3", 256], [*b"4567", 256], [*b"8" * 11]]
    assert rows[0]["positions"].tolist() == [*range(8), *range(7), 0]
    assert summary == ["of 4 conversations read: 1 cut, 10 of their tokens lost"]


def test_what_is_too_long_may_be_dropped_and_what_is_broken_skipped(tmp_path: Path) -> None:
    lines = [line("12"), "{", line("8" * 20), line("3")]
    with (
        pytest.raises(UserError, match=r"chat\.jsonl, line 2: invalid JSON.*data\.on_invalid=skip"),
        Loader(chat(tmp_path, lines)) as loader,
    ):
        list(loader)
    with Loader(chat(tmp_path, lines, on_invalid="skip", on_overlong="drop")) as loader:
        masks = np.concatenate([batch["mask"].ravel() for batch in loader])
        summary = loader.corpus.summary()
    assert masks.sum() == 5
    assert summary == ["of 4 conversations read: 1 dropped as too long; 1 invalid ones skipped"]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"chat_template": None}, "data.tokenizer=bytes requires data.chat_template"),
        (
            {"source": "text", "on_invalid": "skip"},
            "data.on_invalid=skip requires data.source=chat or preference or jsonl or parquet, not text",
        ),
        ({"path": None}, "data.source=chat requires data.path; set a file"),
    ],
)
def test_settings_that_do_not_go_together(tmp_path: Path, data: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        chat(tmp_path, [], **data)
