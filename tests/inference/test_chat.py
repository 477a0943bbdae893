"""Texts in and out: batches as single rows, sampling, stops, conversations."""

import io
import json
import shutil
from pathlib import Path
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxmem.checkpoint.manager import Checkpoints
from jaxmem.checkpoint.saved_state import SavedState
from jaxmem.cli import main
from jaxmem.config import save_config
from jaxmem.config.gguf import read_gguf
from jaxmem.config.gguf_tokenizer import tokenizer_json
from jaxmem.data.tokenizer import Bytes, tokenizer_for
from jaxmem.errors import UserError
from jaxmem.hf.files import copy_metadata, copy_tokenizer
from jaxmem.inference.chat import TextGenerator, decode_stream, read_prompts
from jaxmem.inference.export import export_model
from jaxmem.inference.generate import ENDED, Generator, Sampling
from jaxmem.inference.load import initial_state, open_model
from tests.data.chat_reference import write_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory, compare) -> Path:
    """A Hugging Face directory whose tokens are bytes, with a template."""
    place = tmp_path_factory.mktemp("talk") / "model"
    compare.write_directory("mistral", place)
    given = json.loads((place / "config.json").read_text()) | {"vocab_size": 257}
    (place / "config.json").write_text(json.dumps(given))
    made = {name: compare.values(name, shape) for name, shape in compare.shapes(given).items()}
    save_file(made, place / "model.safetensors")
    copy_tokenizer("bytes", place)
    (place / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }};{{ eos_token }}{% endfor %}")
    return place


@pytest.fixture(scope="module")
def opened(model):
    return open_model(model)


@pytest.fixture(scope="module")
def generator(opened):
    return Generator(*opened)


PROMPTS = [np.frombuffer(text, np.uint8).astype(np.int32) for text in (b"one", b"a longer prompt", b"x")]


def test_a_batch_says_what_each_row_would_alone(generator) -> None:
    """Shorter prompts have padding in front, and a window besides."""
    together = np.stack(list(generator(PROMPTS, 6)))
    for row, prompt in enumerate(PROMPTS):
        assert together[:, row].tolist() == np.stack(list(generator([prompt] * 3, 6)))[:, 0].tolist()


def test_a_row_is_over_after_an_end(generator) -> None:
    free = np.stack(list(generator(PROMPTS, 6)))
    ended = np.stack(list(generator(PROMPTS, 6, ends={int(free[1, 0])})))
    assert ended[:2, 0].tolist() == free[:2, 0].tolist()
    assert (ended[2:, 0] == ENDED).all()


def draws(logits: list[float], **own) -> set[int]:
    keys = jax.random.split(jax.random.key(0), 300)
    picked = jax.vmap(lambda key: Sampling(1.0, **own).sample(jnp.asarray([logits]), key))(keys)
    return set(np.asarray(picked).ravel().tolist())


@pytest.mark.exhaustive
def test_what_may_be_drawn() -> None:
    logits = np.log([0.5, 0.1, 0.3, 0.1]).tolist()
    assert draws(logits) == {0, 1, 2, 3}
    assert draws(logits, top_k=2) == {0, 2}
    assert draws(logits, top_p=0.45) == {0}
    assert draws(logits, top_p=0.75) == {0, 2}
    assert draws(logits, top_k=3, top_p=0.45) == {0}


@pytest.mark.parametrize("temperature", [1e-30, 1e-38, 1e-300])
def test_the_lowest_temperatures_are_greedy(temperature) -> None:
    logits = jnp.asarray([[1.0, 2.0, 50.0, 3.0]])
    assert Sampling(temperature).sample(logits, jax.random.key(0)).tolist() == [2]


@pytest.mark.parametrize("own", [{"temperature": -1.0}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.5}])
def test_invalid_sampling_is_refused(own) -> None:
    with pytest.raises(UserError):
        Sampling(**own)


def test_pieces_end_before_a_stop_and_never_show_a_part_of_it() -> None:
    def spell(ids):
        return bytes(ids).decode(errors="replace")

    said = list(decode_stream(spell, b"ab<en<end>more", ["<end>", "zz"]))
    assert "".join(said) == "ab<en"
    assert said[:3] == ["a", "b", ""]
    assert "".join(decode_stream(spell, b"no stop<e", ["<end>"])) == "no stop<e"
    assert "".join(decode_stream(spell, b"no stop<e\xc3", ["<end>"])) == "no stop<e"  # half of a character at the end


@pytest.mark.parametrize(("stop", "is_cut"), [("d", False), ("e", True)])
def test_an_answer_that_a_stop_ends_at_its_last_token_is_not_cut(model: Path, monkeypatch, stop, is_cut) -> None:
    generator = TextGenerator(model, tokens=4, stops=[stop])
    monkeypatch.setattr(generator, "_conversation", lambda *_: iter(b"abcd"))
    assert "".join(generator.answer([{"role": "user", "content": "hello"}])) == ("abcd" if is_cut else "abc")
    assert generator.is_cut == is_cut


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    out, err = capsys.readouterr()
    return ended.value.code, out, err


@pytest.mark.exhaustive
def test_commands(model: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    """A prompt, a file of them, a conversation, an evaluation: of a Hugging Face directory."""
    some = ("--tokens", "4", "--temperature", "0")
    code, out, err = run(capsys, "generate", str(model), "--prompt", "one", *some)
    assert (code, err) == (0, "")
    assert out.startswith("one")
    code, coded, err = run(
        capsys, "generate", str(model), "precision.parameters=int8", "generate.kv_cache=int8", "--prompt", "one", *some
    )
    assert (code, err, coded[:3]) == (0, "", "one")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "one"}\n\n{"prompt": "another"}\n')
    code, lines, _ = run(capsys, "generate", str(model), "--prompts", str(tmp_path / "prompts.jsonl"), *some)
    found = [json.loads(line) for line in lines.splitlines()]
    assert [one["prompt"] for one in found] == ["one", "another"]
    assert "one" + found[0]["text"] + "\n" == out
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n\n/new\nhello\n"))
    code, answers, err = run(capsys, "chat", str(model), "--system", "s", *some)
    assert (code, err.count("cut off after 4 tokens"), err.count("\n")) == (0, 2, 2)
    half = len(answers) // 2
    assert answers[:half] == answers[half:]  # after /new it knows of nothing
    chats = tmp_path / "chats.jsonl"
    chats.write_text('{"instruction": "ab", "output": "c"}\n')
    text = tmp_path / "chats.txt"
    text.write_text(chats.read_text())
    losses = set()
    for data in (chats, text):  # the answer and its end, or all characters
        code, out, err = run(capsys, "evaluate", str(model), "--data", str(data), "--json")
        assert (code, err) == (0, "")
        losses.add(json.loads(out)["loss"])
    assert len(losses) == 2
    code, _, err = run(capsys, "evaluate", str(model), "--data", str(chats), "data.source=text")
    assert (code, err.count("\n"), "use data.source=jsonl" in err) == (2, 1, True)
    chats.write_text("{")
    code, _, err = run(capsys, "evaluate", str(model), "--data", str(chats), "--json")
    assert (code, err.count("\n")) == (2, 1)
    code, _, err = run(capsys, "evaluate", str(model))
    assert (code, err.count("\n")) == (2, 1)
    assert "use --data FILE" in err


def test_a_prompt_ends_where_its_line_ends(tmp_path: Path) -> None:
    """A byte order mark, with which editors on Windows begin a file, is not a part of the first prompt."""
    (tmp_path / "p.txt").write_bytes("\ufeffone\u2028two\x0cthree\r\n\nfour".encode())
    assert read_prompts(tmp_path / "p.txt") == ["one\u2028two\x0cthree", "four"]
    (tmp_path / "p.NDJSON").write_text('{"prompt": "one"}\n')
    assert read_prompts(tmp_path / "p.NDJSON") == ["one"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("p.jsonl", "{", "line 1: .*prompt: invalid JSON"),
        ("p.jsonl", '\n{"prompt": 1}', "line 2: prompt is missing or not a string"),
        ("p.jsonl", '{"prompt": "\\ud800"}', "not valid Unicode"),
        ("p.jsonl", "", "write one prompt per line"),
        ("p", "\n", "write one prompt per line"),
    ],
)
def test_invalid_prompts_are_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=message):
        read_prompts(tmp_path / name)


def test_another_model_s_tokenizer_is_refused(model: Path, tmp_path: Path) -> None:
    place = tmp_path / "model"
    shutil.copytree(model, place)
    write_tokenizer("", place)
    with pytest.raises(UserError, match=r"has 280 tokens, more than model\.vocab=257"):
        TextGenerator(place)


def test_a_conversation_cannot_be_forged_and_needs_a_template(model: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    generator = TextGenerator(model)
    with pytest.raises(UserError, match="is a special token of the model"):
        generator.answer([{"role": "user", "content": "<|endoftext|>"}])
    shutil.copytree(model, tmp_path / "model")
    (tmp_path / "model/chat_template.jinja").unlink()
    with pytest.raises(UserError, match="no chat template"):
        TextGenerator(tmp_path / "model").answer([{"role": "user", "content": "a"}])
    monkeypatch.setattr("sys.stdin", io.StringIO(""))  # before the first message
    code, _, err = run(capsys, "chat", str(tmp_path / "model"))
    assert (code, "no chat template" in err) == (2, True)


def test_a_message_that_is_refused_does_not_end_a_conversation_on_a_terminal(model: Path, capsys, monkeypatch) -> None:
    for is_terminal in (True, False):
        text = io.StringIO("<|endoftext|>\n")
        monkeypatch.setattr(text, "isatty", lambda is_terminal=is_terminal: is_terminal)
        monkeypatch.setattr("sys.stdin", text)
        code, _, err = run(capsys, "chat", str(model))
        assert err.startswith("error: <|endoftext|> is a special token of the model")
        assert code == (0 if is_terminal else 2)


class WithChannels(Bytes):
    """The special tokens around the name of a channel, of gpt-oss."""

    special = MappingProxyType({**Bytes.special, "<|channel|>": 257, "<|message|>": 258})


@pytest.mark.parametrize("stop", ["none", "d"])
def test_a_conversation_goes_on_after_the_text_of_the_final_channel(
    model: Path, tmp_path: Path, capsys, monkeypatch, stop
) -> None:
    prompts = []

    def answer(_conversation, tokens, *_):
        prompts.append(bytes(tokens.tolist()).decode())
        return iter([257, *b"analysis", 258, *b"why", 257, *b"final", 258, *b"said"])

    monkeypatch.setattr("jaxmem.inference.chat.tokenizer_for", lambda *_: WithChannels())
    monkeypatch.setattr("jaxmem.inference.generate.Conversation.__call__", answer)
    (template := tmp_path / "x.jinja").write_text("{% for m in messages %}{{ m.content }};{% endfor %}")
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n"))
    _, out, _ = run(capsys, "chat", str(model), f"data.chat_template={template}", "--stop", stop)
    said = "said".removesuffix(stop)
    assert out == f"analysiswhyfinal{said}\n" * 2
    assert prompts == ["one;", f"one;{said};two;"]


@pytest.mark.exhaustive
def test_a_batch_of_conversations_has_the_answers_of_each(model: Path) -> None:
    conversations = [[{"role": "user", "content": text}] for text in ("one", "a longer text", "b")]
    generator = TextGenerator(model, tokens=6)
    alone = ["".join(generator.answer(messages)) for messages in conversations]
    assert list(generator.answer_all(conversations, batch=2)) == alone
    assert len(set(alone)) > 1


def test_equal_prompts_in_several_batches_have_different_continuations(model: Path) -> None:
    generator = TextGenerator(model, Sampling(temperature=3.0), tokens=4)
    texts = list(generator.complete_all(["one"] * 4, batch=2))
    assert texts[:2] != texts[2:]
    assert list(generator.complete_all(["one"] * 4, batch=2)) == texts


@pytest.mark.exhaustive
@pytest.mark.parametrize("how", ["adapter", "merge"])
def test_an_exported_run_has_the_template_of_its_data(how: str, model: Path, tmp_path: Path) -> None:
    (template := tmp_path / "template.jinja").write_text("{{ messages[0].content }}")
    built, _ = open_model(model, ["adapter.kind=lora", f"data.chat_template={template}"])
    params = SavedState(built).to_save(initial_state(built)).params
    save_config(built.cfg, tmp_path / "run/config.yaml")
    with Checkpoints(tmp_path / "run/checkpoints") as checkpoints:
        checkpoints.save(0, {"params": params}, {}, built.cfg.model_dump(mode="json"), force=True)
    export_model(tmp_path / "run", tmp_path / "out", **{how: True})
    template.unlink()
    assert (tmp_path / "out/chat_template.jinja").read_text() == "{{ messages[0].content }}"
    assert TextGenerator(tmp_path / "out", tokens=1).answer([{"role": "user", "content": "a"}])


def test_a_continuation_keeps_the_space_that_a_decoder_removes_at_the_beginning_of_a_text(
    model: Path, tmp_path: Path, monkeypatch
) -> None:
    """The decoders of Llama 2 and Mistral remove it."""
    texts = ["<unk>", "<s>", "</s>", "▁Hello", "▁", "w"]
    metadata = {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 1], "tokenizer.ggml.scores": [0.0] * len(texts),
        "tokenizer.ggml.bos_token_id": 1,
    }  # fmt: skip
    shutil.copytree(model, tmp_path / "model")
    (tmp_path / "model/tokenizer.json").write_text(json.dumps(tokenizer_json(metadata, 257)))
    generator = TextGenerator(tmp_path / "model", tokens=2)
    tokens = iter([4, 5] * 4)
    monkeypatch.setattr(generator._generate, "_read", lambda state, *_: np.full(len(state.first), next(tokens)))
    monkeypatch.setattr(generator, "_encode", lambda prompt: np.array([1, 3] if prompt else [1]))
    assert "".join(generator.complete("Hello")) == " w"
    assert list(generator.complete_all(["Hello"])) == [" w"]
    assert "".join(generator.complete("")) == "w", "the beginning of a text"


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def chatml(model: Path, tmp_path: Path) -> Path:
    """A base model with a template of conversations, whose settings name only the end of a document (Qwen 2.5)."""
    place = tmp_path / "chatml"
    shutil.copytree(model, place)
    settings = json.loads((place / "config.json").read_text()) | {"vocab_size": 259, "eos_token_id": 256}
    (place / "config.json").write_text(json.dumps(settings))
    (place / "generation_config.json").write_text('{"eos_token_id": 256}')
    weights = load_file(place / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = np.concatenate([weights[name], weights[name][:2]])
    save_file(weights, place / "model.safetensors")
    content = json.loads((place / "tokenizer.json").read_text())
    added = content["added_tokens"]
    added += [{**added[0], "id": 257 + n, "content": name} for n, name in enumerate(("<|im_start|>", "<|im_end|>"))]
    (place / "tokenizer.json").write_text(json.dumps(content))
    (place / "chat_template.jinja").write_text(CHATML)
    return place


def test_the_token_that_ends_a_turn_in_the_template_ends_an_answer(chatml: Path, monkeypatch) -> None:
    generator = TextGenerator(chatml, tokens=4)
    monkeypatch.setattr(generator._generate, "_read", lambda state, *_: np.full(len(state.first), 258))
    question = [{"role": "user", "content": "a"}]
    assert list(generator.answer(question)) == [""]
    assert not generator.is_cut
    assert list(generator.answer_all([question])) == [""]
    assert list(generator.complete("a")) == [""] * 4, "a document ends with another token"


def test_an_export_of_a_run_on_conversations_names_the_token_that_ends_a_turn(chatml: Path, tmp_path: Path) -> None:
    built, _ = open_model(chatml, ["data.source=chat", "data.path=none.jsonl", "data.packing=true"])
    params = SavedState(built).to_save(initial_state(built)).params
    save_config(built.cfg, tmp_path / "run/config.yaml")
    copy_metadata(chatml, tmp_path / "run/hf")
    with Checkpoints(tmp_path / "run/checkpoints") as checkpoints:
        checkpoints.save(0, {"params": params}, {}, built.cfg.model_dump(mode="json"), force=True)
    export_model(tmp_path / "run", tmp_path / "out")
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "out" / name).read_text())["eos_token_id"] == [256, 258]
    export_model(tmp_path / "run", tmp_path / "out.gguf")
    read = read_gguf(tmp_path / "out.gguf").metadata
    assert [read[f"tokenizer.ggml.{name}_token_id"] for name in ("eos", "eot")] == [256, 258]


def test_bytes_as_a_file_are_the_bytes(tmp_path: Path) -> None:
    copy_tokenizer("bytes", tmp_path)
    found = tokenizer_for(str(tmp_path))
    text = "naïve\n\t😀 \x00<|endoftext|>"
    assert found.encode(text).tolist() == Bytes().encode(text).tolist()
    assert found.encode_with_offsets(text)[0].tolist() == Bytes().encode_with_offsets(text)[0].tolist()
    assert (found.vocab_size, found.end, found.ends, found.begin) == (257, 256, frozenset({256}), ())
