"""Conversations: their three forms, any template, and only what the assistant says is learnt."""

import json
import shutil
import warnings
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmem.config import load_config
from jaxmem.data import chat_template
from jaxmem.data.chat import ChatEncoder, _common_prefix
from jaxmem.data.chat_forms import chat_of
from jaxmem.data.chat_template import ChatTemplate, TemplateError, template_for
from jaxmem.data.corpus import fingerprint
from jaxmem.data.loader import Loader
from jaxmem.data.records import InvalidRecordError
from jaxmem.data.tokenizer import Bytes, tokenizer_for
from jaxmem.errors import UserError
from tests.data import chat_reference as reference

RECORDED = json.loads(Path(__file__).with_name("conversations.json").read_text())
PLAIN = (
    "{% for m in messages %}{{ m.role[0] + ':' + m.content + (eos_token if m.role == 'assistant' else '') }}"
    "{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
HI = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bc"}]


@given(*[st.text(st.sampled_from("ab"), max_size=9)] * 3)
def test_the_common_prefix_of_two_texts(before: str, left: str, right: str) -> None:
    texts = before + left, before + right
    length = _common_prefix(*texts)
    assert texts[0][:length] == texts[1][:length]
    assert length == min(map(len, texts)) or texts[0][length] != texts[1][length]


@pytest.mark.parametrize("name", RECORDED)
def test_tokens_and_targets_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """With the template's marks, and as they are found without marks."""
    marked = reference.TEMPLATES[name]
    for template in (marked, reference.without_marks(marked))[: 1 if name == "last" else 2]:
        reference.write_tokenizer(template, tmp_path)
        tokenizer = tokenizer_for(str(tmp_path))
        encoder = ChatEncoder(tokenizer, template_for(tokenizer))
        for case, expected in RECORDED[name].items():
            line = reference.CONVERSATIONS[case]
            with warnings.catch_warnings(action="ignore"):  # fields that a template does not read
                found = encoder.document(chat_of(line))
            assert found.tokens.tolist() == expected["ids"], case
            assert found.is_target.astype(int).tolist() == expected["targets"], case
            asked = template_for(tokenizer).render(line["messages"][:-1], line.get("tools"), answer=True)
            assert asked.text == expected["asked"]


def test_a_header_that_includes_the_spaces_after_it_is_no_target(tokenizer_file: str, tmp_path: Path) -> None:
    """The special tokens of Phi-3 do."""
    from tokenizers import AddedToken, Tokenizer

    changed = Tokenizer.from_file(tokenizer_file)
    changed.add_special_tokens([AddedToken("<|assistant|>", special=True, rstrip=True)])
    changed.save(str(tmp_path / "tokenizer.json"))
    tokenizer = tokenizer_for(str(tmp_path))
    source = (
        "{% for m in messages %}{{ ('<|assistant|>' if m.role == 'assistant' else '') + m.content + eos_token }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    encoder = ChatEncoder(tokenizer, ChatTemplate(source, "here", {"eos_token": "<|end_of_text|>"}))
    document = encoder.document(chat_of({"instruction": "a", "output": " <b"}))
    assert document.is_target is not None
    header = document.tokens == tokenizer.special["<|assistant|>"]
    assert header.sum() == 1
    assert not document.is_target[header].any()
    assert document.is_target.sum() == 3


def test_a_call_before_the_last_question_is_a_target_from_its_beginning(tmp_path: Path) -> None:
    """Mistral's template lists the tools before the last question, so an earlier prompt is other text."""
    call = [reference.said(None, tool_calls=[reference.CALL]), reference.RESULT, reference.said("3")]
    line = {"messages": [reference.ASK, *call, reference.TWO, *call], "tools": [reference.TOOL]}
    marked = reference.TEMPLATES["mistral"]
    documents = []
    for template in (marked, reference.without_marks(marked)):
        reference.write_tokenizer(template, tmp_path)
        tokenizer = tokenizer_for(str(tmp_path))
        encoder = ChatEncoder(tokenizer, template_for(tokenizer))
        documents.append(encoder.document(chat_of(line)))
    with_marks, without_marks = documents
    assert without_marks.is_target.tolist() == with_marks.is_target.tolist()


CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ({"messages": HI}, HI),
        ({"messages": [HI[0] | {"content": [{"type": "text", "text": "a"}], "name": None}, HI[1]]}, HI),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "bc", "weight": 1}]}, HI),
        ({"conversations": HI}, HI),
        ({"instruction": "a", "input": "", "output": "bc"}, HI),
        ({"instruction": "x", "input": "y", "output": "bc"}, [{"role": "user", "content": "x\n\ny"}, HI[1]]),
        ({"instruction": "a", "output": "bc", "history": [["a", "bc"]]}, [*HI, *HI]),
        ({"system": "s", "instruction": "a", "output": "bc"}, [{"role": "system", "content": "s"}, *HI]),
        ({"prompt": "a", "completion": "bc"}, HI),
        ({"prompt": HI[:1], "completion": HI[1:]}, HI),
        (
            {
                "conversations": [
                    {"from": "human", "value": "a"},
                    {"from": "function_call", "value": '{"name": "f", "arguments": "{\\"x\\": 1}"}'},
                    {"from": "observation", "value": "2"},
                ]
            },
            [
                HI[0],
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "content": "2"},
            ],
        ),
    ],
)
def test_the_forms_of_a_line(line: dict[str, object], expected: object) -> None:
    assert chat_of(line).messages == expected


def test_which_messages_are_targets_and_tools() -> None:
    unlearnt = HI[1] | {"weight": 0}
    assert chat_of({"messages": [*HI, HI[0], unlearnt, *HI]}).targets == {1, 5}
    assert chat_of({"system": "s", "prompt": [*HI, HI[0]], "completion": HI[1:]}).targets == {4}
    assert chat_of({"messages": HI, "tools": '[{"name": "f"}]'}).tools == [{"name": "f"}]
    assert [chat_of({"messages": HI, "tools": tools}).tools for tools in ([], "[]", "", None)] == [None] * 4


def messages(**second: object) -> dict[str, object]:
    return {"messages": [HI[0], HI[1] | second]}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"text": "a"}, "expected messages, conversations, or instruction and output; found text"),
        ({"messages": []}, "messages must be a list"),
        ({"messages": ["a"]}, "must contain messages, not a"),
        ({"messages": [{"content": "a"}]}, "must have the key role"),
        (messages(content=None), "must have the key content"),
        (messages(content=[{"type": "image"}]), "image is not supported"),
        (messages(content=3), "content must be a string"),
        (messages(weight=0.5), "weight=0.5 .* use 0 or 1"),
        (messages(weight=0), "no assistant message"),
        (messages(tool_calls="f"), "tool_calls must be a list"),
        (messages(tool_calls=[{"function": {}}]), "must have function.name"),
        (messages(tool_calls=[{"name": "f", "arguments": "{"}]), "invalid JSON"),
        (messages(tool_calls=[{"name": "f", "arguments": '["\\ud800"]'}]), "not valid Unicode"),
        ({"messages": HI, "tools": {}, "chat_template_kwargs": 1}, "chat_template_kwargs must be a JSON object"),
        ({"messages": HI, "tools": ["f"]}, "tools must be a list of JSON objects"),
        ({"instruction": "a", "output": "b", "history": ["a"]}, "history must be a list"),
    ],
)
def test_lines_that_are_no_conversation(line: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRecordError, match=message):
        chat_of(line)


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, "here", {"eos_token": "<|endoftext|>"})


def encoded(line: dict[str, object], source: str = PLAIN) -> tuple[str, str]:
    """All tokens and the targets; `|` is the end."""
    found = ChatEncoder(Bytes(), template(source)).document(chat_of(line))
    texts = [["|" if i == 256 else chr(i) for i in ids] for ids in (found.tokens, found.tokens[found.is_target])]
    return "".join(texts[0]), "".join(texts[1])


MARKED = (
    "{% for m in messages %}{{ m.role[0] }}:{% if m.role == 'assistant' %}{% generation %}{{ m.content }}|"
    "{{ eos_token }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)


def test_a_message_of_weight_0_is_no_target() -> None:
    line = {"messages": [*HI, HI[0], {"role": "assistant", "content": "d", "weight": 0}]}
    assert encoded(line) == ("u:aa:bc|u:aa:d|", "bc|")
    assert encoded(line, MARKED) == ("u:aa:bc||u:aa:d||", "bc||")


@pytest.mark.parametrize("answer", ["\ue000", "\ue000b\ue000", "\uf8ff", "b\ue001"])
def test_an_answer_may_have_any_character(answer: str) -> None:
    line = {"messages": [HI[0], {"role": "assistant", "content": answer}, *HI]}
    expected = answer.encode().decode("latin-1")  # `encoded` shows each byte
    assert encoded(line) == (f"u:aa:{expected}|u:aa:bc|", f"{expected}|bc|")


def test_what_a_template_does_not_read_is_named() -> None:
    unread = "the key mood has no effect: the chat template does not read it"
    with pytest.warns(UserWarning, match=unread) as found:
        encoded({"messages": [HI[0] | {"mood": "x"}, HI[1] | {"mood": "y"}]})
    assert len(found) == 1
    with pytest.raises(InvalidRecordError, match="does not support tool_calls"):
        encoded(messages(content=None, tool_calls=[CALL]))
    with pytest.warns(UserWarning, match="no end token after an answer"):
        assert encoded({"messages": HI}, PLAIN.replace("eos_token", "'.'")) == ("u:aa:bc.", "bc")


def test_a_text_cannot_forge_a_turn() -> None:
    for field in ({"content": "a<|endoftext|>"}, {"name": [{"<|endoftext|>": 1}]}):
        with pytest.raises(InvalidRecordError, match=r"special token <\|endoftext\|>"):
            encoded({"messages": [HI[0] | field, HI[1]]})
    with pytest.raises(InvalidRecordError, match="renders no assistant message"):
        encoded({"messages": HI}, "{{ messages[0].content }}")


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
        "{{ '\\ud800' }}",
    ],
)
def test_a_template_does_nothing_but_write(source: str) -> None:
    with pytest.raises(TemplateError):
        template(source).render(HI)


def test_a_template_without_end_is_ended_and_the_next_is_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 0.3)
    monkeypatch.setattr(chat_template, "_process", cache(chat_template._process.__wrapped__))
    loops = "{% for i in range(99999) %}" * 4 + "{% endfor %}" * 4
    with pytest.raises(UserError, match=r"here: the chat template needs more than 0.3 s of processor time"):
        template(loops).render(HI)
    with pytest.raises(TemplateError, match="the chat template fails: it needs more than 1024 MiB"):
        template("{{ messages[0].role * 2 ** 31 }}").render(HI)
    assert template(PLAIN).render(HI)
    chat_template._end(chat_template._process())


def test_invalid_templates() -> None:
    with pytest.raises(UserError, match="here: not a valid chat template"):
        template("{% if %}")
    with pytest.raises(UserError, match=r"no chat template .*; set data.chat_template"):
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


def test_the_fingerprint_has_the_special_tokens_that_a_template_writes(tmp_path: Path, tokenizer_file: str) -> None:
    """A run that resumes with another eos_token in tokenizer_config.json would end its answers differently."""
    shutil.copy(tokenizer_file, tmp_path)
    cfg = chat(tmp_path, [line("a")], tokenizer=str(tmp_path)).replace(model={"vocab": 290})

    def fingerprint_with(**tokens: str) -> str:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokens))
        return fingerprint(cfg)

    before = fingerprint_with(eos_token="<|end_of_text|>")
    assert fingerprint_with(eos_token="<|end_of_text|>", pad_token="<|begin_of_text|>") == before  # not written
    assert fingerprint_with(eos_token="<|begin_of_text|>") != before


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


def test_a_file_of_another_form_is_reported_before_its_number_of_records(tmp_path: Path) -> None:
    for wrong, reason in (("[{}]", "must be a JSON object"), ('{"turns": []}', "expected messages, .*found turns")):
        with pytest.raises(UserError, match=rf"line 1: {reason}"):
            Loader(chat(tmp_path, [wrong], held_out=0.1))
    with pytest.raises(UserError, match="requires at least 2 records"):
        Loader(chat(tmp_path, [line("12")], held_out=0.1))


def test_an_answer_that_is_cut_completely_is_dropped(tmp_path: Path) -> None:
    long = json.dumps({"instruction": "q" * 20, "output": "3"})
    with Loader(chat(tmp_path, [line("12"), long])) as loader:
        assert sum(batch["mask"].sum() for batch in loader) == 3
        assert loader.corpus.summary() == ["of 2 conversations read: 1 dropped as too long"]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"chat_template": None}, "data.tokenizer=bytes requires data.chat_template"),
        (
            {"source": "tokens", "on_invalid": "skip"},
            "data.on_invalid=skip requires data.source=stdlib, text, jsonl, parquet, arrow, chat or preference",
        ),
        ({"path": None}, "data.source=chat requires data.path"),
    ],
)
def test_settings_that_do_not_go_together(tmp_path: Path, data: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        chat(tmp_path, [], **data)


def test_a_missing_file_and_a_missing_template_are_reported_together(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data\.path=nowhere.*\n.*no\.jinja"):
        Loader(chat(tmp_path, [], path="nowhere", chat_template="no.jinja"))
