"""Bad input of every kind that is read from somebody else: an answer or one clear error, never a traceback."""

import json
import os
import re
from pathlib import Path

import pytest

from jaxmem.config import Decoder, load_config
from jaxmem.config.hugging_face import decoder_fields, fields_of
from jaxmem.config.peft import adapter_fields
from jaxmem.data.cache import _read_meta
from jaxmem.data.chat_template import ChatTemplate, template_for
from jaxmem.data.jsonl import parse_object
from jaxmem.data.tokenizer import Bytes, tokenizer_for
from jaxmem.errors import UserError
from jaxmem.hf.files import copy_metadata, copy_tokenizer
from jaxmem.hf.tensors import Tensors
from jaxmem.planning.targets import parse_target
from tests.support.fuzz import fuzz
from tests.support.untrusted import kinds

KINDS = kinds()
ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("name", KINDS)
def test_mutated_input_is_read_or_refused(name):
    kind = KINDS[name]
    found = fuzz(name, kind, seed=0, inputs=iter(range(6 if kind.slow else 40)))
    assert found["failures"] == []
    assert found["corpus"] > len(kind.examples), "some must reach lines that good inputs do not"


def written(path: Path, content) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return path


def test_errors_quote_the_input_in_a_readable_line():
    with pytest.raises(UserError) as refused:
        parse_target("h100" * 50_000)
    assert len(str(refused.value)) < 1000
    assert str(refused.value).startswith("target h100h100")


@pytest.mark.parametrize("content", [b"\xff", b"[" * 5000, b"memory_gib: " + b"9" * 5000])
def test_invalid_target_files_are_refused(content, tmp_path):
    with pytest.raises(UserError, match=r"target .*yaml"):
        parse_target(str(written(tmp_path / "x.yaml", content)))


LLAMA = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 257,
    "use_sliding_window": True,
}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"architectures": 3}, r"architectures=3 must be a list"),
        ({"layer_types": [[]]}, "layer_types=.* must be sliding_attention or full_attention"),
        ({"max_window_layers": "x"}, "max_window_layers=.* must be a whole number"),
        ({"rope_scaling": {"rope_type": []}}, r"rope_type=\[\] is not supported"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps=.* must be a number"),
    ],
)
def test_invalid_settings_of_a_model_are_refused(wrong, message, tmp_path):
    written(tmp_path / "config.json", LLAMA | wrong)
    with pytest.raises(UserError, match=message):
        decoder_fields(str(tmp_path))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"target_modules": [[]]}, "target_modules=.* must be text"),
        ({"target_modules": "(" * 9}, "target_modules: invalid regex: .*unterminated"),
        ({"rank_pattern": 3}, "rank_pattern=3 must be a mapping"),
        ({"lora_dropout": "x"}, "lora_dropout=.* must be a number"),
        ({"lora_alpha": 10**400}, "lora_alpha=.* must be a number"),
    ],
)
def test_invalid_settings_of_an_adapter_are_refused(wrong, message, tmp_path):
    written(tmp_path / "adapter_config.json", {"target_modules": ["q_proj"]} | wrong)
    with pytest.raises(UserError, match=message):
        adapter_fields(tmp_path, Decoder(**fields_of(LLAMA)))


def test_an_index_of_impossible_names(tmp_path):
    written(tmp_path / "model.safetensors.index.json", {"weight_map": {"a": "x" * 300}})
    with pytest.raises(UserError, match="is not the name of a file"):
        Tensors(tmp_path)


def test_a_template_nested_too_deep():
    with pytest.raises(UserError, match="not a valid chat template"):
        ChatTemplate("{{ " + "[" * 5000, "here", {})


def test_a_role_that_is_no_text():
    with pytest.raises(UserError, match="not valid Unicode"):
        parse_object(b'{"messages": [{"role": "\\ud800", "content": "x"}]}')


def test_nothing_reads_the_wall_clock():
    """So a clock that jumps, back or forward, changes nothing. (A benchmark writes its date.)"""
    reads = re.compile(r"\btime\.time\(|\bdatetime\.now\(|\bgmtime\(|\blocaltime\(")
    sources = [path for path in (ROOT / "jaxmem").rglob("*.py") if path.parent.name != "bench"]
    assert [str(path) for path in sources if reads.search(path.read_text())] == []


def test_no_secret_is_kept_in_a_config():
    run = {"name": "x", "model": {"preset": "tiny"}, "train": {"steps": 1}}
    with pytest.raises(UserError, match=r"checkpoint\.path contains a password") as refused:
        load_config(run, ["checkpoint.path=s3://key:s3cret@bucket/runs"])
    assert "s3cret" not in str(refused.value)


def test_no_link_leads_out_of_a_directory_of_weights(tmp_path):
    """But as the cache of Hugging Face has them, into its own folder of files."""
    secret = written(tmp_path / "secret", b"s3cret")
    model, blobs = tmp_path / "snapshots" / "one", tmp_path / "blobs"
    model.mkdir(parents=True)
    blobs.mkdir()
    written(blobs / "1f0c", {})
    (model / "config.json").symlink_to("../../blobs/1f0c")
    copy_metadata(model, tmp_path / "taken")
    assert [path.name for path in (tmp_path / "taken").iterdir()] == ["config.json"]
    (model / "merges.txt").symlink_to(secret)
    for copy in (copy_metadata, copy_tokenizer):
        with pytest.raises(UserError, match=r"merges\.txt: a link to .*, outside of its directory"):
            copy(str(model), tmp_path / "other")
    assert not (tmp_path / "other" / "merges.txt").exists()


READERS = {
    "tokenizer.json": lambda path: tokenizer_for(str(path)),
    "chat_template.jinja": lambda path: template_for(Bytes(), str(path)),
    "config.json": lambda path: decoder_fields(str(path.parent)),
    "meta.json": lambda path: _read_meta(path.parent),
    "gpu.yaml": lambda path: parse_target(str(path)),
}


@pytest.mark.parametrize("name", READERS)
def test_sparse_files_are_refused_at_once(name, tmp_path):
    written(tmp_path / name, b"")
    os.truncate(tmp_path / name, 1 << 40)
    with pytest.raises(UserError, match=name):
        READERS[name](tmp_path / name)


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja", "meta.json", "gpu.yaml"])
def test_pipes_are_refused_at_once(name, tmp_path):
    os.mkfifo(tmp_path / name)
    with pytest.raises(UserError, match=f"{name}: is not a regular file"):
        READERS[name](tmp_path / name)


def test_control_characters_are_escaped_in_errors():
    text = str(UserError("a\x1b[2Jb\rc\nsecond \u202e line"))
    assert text == "a\\x1b[2Jb\\rc\nsecond \\u202e line"


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        (f"seed={2**63}", "must be below"),
        ("data.sequence_length=2147483647", "must be at most 67108864"),
        ("model.layers=1000000000", "must be at most 10000"),
    ],
)
def test_numbers_that_no_run_can_have_are_refused_at_once(override, reason):
    with pytest.raises(UserError, match=f"{override} {reason}"):
        load_config(ROOT / "configs/demo.yaml", [override])
