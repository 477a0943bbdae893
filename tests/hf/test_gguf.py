"""GGUF files: logits and tokens as transformers reads the same file, export, and files that are refused."""

import json
import struct
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from gguf import GGUFReader, LlamaFileType, dequantize
from safetensors.numpy import load_file

from jaxmem import hf
from jaxmem.config import Decoder, load_config
from jaxmem.config.gguf import read_gguf
from jaxmem.config.gguf_tokenizer import has_space_prefix, pre_tokenizer_name
from jaxmem.config.hub import local_directory
from jaxmem.config.methods import run_config
from jaxmem.data.chat_template import template_for
from jaxmem.data.tokenizer import tokenizer_for
from jaxmem.errors import UserError
from jaxmem.hf.files import byte_tokenizer
from jaxmem.inference.export import export_model
from jaxmem.inference.load import model_config, open_model
from jaxmem.models import build
from tests.hf.gguf_reference import CASES, IDS, LAST, TEXTS, tensors_of, write_file

SMALL = {"vocab": 264, "layers": 2, "embed": 64, "mlp": 96, "heads": 4, "kv_heads": 2, "head_dim": 16}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def recorded() -> Any:
    return np.load(Path(__file__).parent / "data/gguf.npz")


def directory_of(name: str, folder: Path, **changes: Any) -> str:
    write_file(name, folder / f"{name}.gguf", **changes)
    return local_directory(str(folder / f"{name}.gguf"), "model.hf")


@pytest.mark.parametrize("name", [name for name in CASES if "moe" not in name and not name.startswith("gemma")])
def test_logits_and_tokens_equal_those_of_transformers(name: str, tmp_path: Path, recorded: Any) -> None:
    check_against_transformers(name, tmp_path, recorded)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [name for name in CASES if "moe" in name or name.startswith("gemma")])
def test_logits_and_tokens_of_larger_files_equal_those_of_transformers(
    name: str, tmp_path: Path, recorded: Any
) -> None:
    check_against_transformers(name, tmp_path, recorded)


def check_against_transformers(name: str, folder: Path, recorded: Any) -> None:
    directory = directory_of(name, folder)
    logits = hf.load(directory)(jnp.asarray(IDS, jnp.int32))
    np.testing.assert_allclose(logits[:, -LAST:], recorded[f"{name}.logits"], atol=2e-5)
    tokenizer = tokenizer_for(directory)
    ids = [[*tokenizer.begin, *tokenizer.encode_with_offsets(text)[0].tolist()] for text in TEXTS]
    assert ids == json.loads(str(recorded[f"{name}.ids"]))


@pytest.mark.exhaustive
def test_experts_of_gpt_oss_are_transposed_and_decoded(tmp_path: Path) -> None:
    model = hf.load(directory_of("gpt-oss", tmp_path))
    expected = tensors_of("gpt-oss")
    gate = np.asarray(model.blocks.mlp.gate.weight.get_value())[1]  # [expert, in, out]
    stored = {tensor.name: tensor for tensor in GGUFReader(tmp_path / "gpt-oss.gguf").tensors}[
        "blk.1.ffn_gate_exps.weight"
    ]
    np.testing.assert_array_equal(gate, dequantize(stored.data, stored.tensor_type).swapaxes(1, 2))
    assert np.corrcoef(gate.swapaxes(1, 2).ravel(), expected["blk.1.ffn_gate_exps.weight"].ravel())[0, 1] > 0.98
    np.testing.assert_array_equal(
        np.asarray(model.blocks.mlp.up.bias.get_value())[0], expected["blk.0.ffn_up_exps.bias"]
    )
    assert model.cfg.rope.scaling == "yarn"
    assert not model.cfg.rope.truncate


def test_experts_of_mixtral_are_read_one_by_one(tmp_path: Path) -> None:
    model = hf.load(directory_of("mixtral", tmp_path))
    up = np.asarray(model.blocks.mlp.up.weight.get_value())[1, 2]
    np.testing.assert_array_equal(up.T, tensors_of("mixtral")["blk.1.ffn_up_exps.weight"][2])


def test_norms_after_the_layers_of_olmo2(tmp_path: Path) -> None:
    model = hf.load(directory_of("olmo2", tmp_path))
    scale = np.asarray(model.blocks.mlp_post_norm.scale.get_value())[1]
    np.testing.assert_array_equal(scale, tensors_of("olmo2")["blk.1.post_ffw_norm.weight"])


def test_a_shard_decodes_only_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from jaxmem.hf.tensors import Tensors

    directory = directory_of("qwen2", tmp_path)
    tensors = Tensors(directory)
    name = "model.layers.0.mlp.up_proj.weight"
    complete = tensors.read(name, (96, 64), (slice(None), slice(None)))
    sizes = []
    monkeypatch.setattr("gguf.dequantize", lambda data, kind: sizes.append(data.shape) or dequantize(data, kind))
    part = tensors.read(name, (96, 64), (slice(24, 48), slice(32, 64)))
    np.testing.assert_array_equal(part, complete[24:48, 32:])
    assert sizes == [(24, 68)]  # rows of 64 values in q8_0


def test_scaled_rotary_positions(tmp_path: Path) -> None:
    scaling = {f"llama.rope.scaling.{key}": value for key, value in {"type": "linear", "factor": 4.0}.items()}
    assert load_config(run_of(directory_of("llama", tmp_path, changes=scaling))).model.rope.factor == 4
    turns = 8192 / (2 * np.pi * 10000.0 ** (np.arange(0, 16, 2) / 16))
    smooth = np.clip((turns - 1) / 3, 0, 1)
    factors = {"rope_freqs.weight": (1 / ((1 - smooth) / 8 + smooth)).astype(np.float32)}
    rope = load_config(run_of(directory_of("llama", tmp_path, tensors=factors))).model.rope
    assert (rope.scaling, rope.factor, rope.original_length) == ("llama3", 8, 8192)
    factors["rope_freqs.weight"][3] = 3
    with pytest.raises(UserError, match=r"rope_freqs.weight has other factors than Llama 3.1"):
        directory_of("llama", tmp_path, tensors=factors)


def run_of(directory: str) -> dict[str, Any]:
    return {"name": "x", "model": {"hf": directory}, "batch": {"global_size": 1}, "train": {"steps": 1}}


def test_a_file_is_a_model_for_each_command(tmp_path: Path) -> None:
    file = tmp_path / "llama.gguf"
    write_file("llama", file)
    assert load_config(run_of(str(file))).data.tokenizer == load_config(run_of(str(file))).model.hf
    assert run_config(file, method="qlora").model.embed == 64
    assert model_config(file).precision.parameters == "float32"
    program, params = open_model(file)
    expected = tensors_of("llama")["blk.1.ffn_down.weight"]
    np.testing.assert_array_equal(np.asarray(params["blocks"]["mlp"]["down"]["weight"])[1].T, expected)
    messages = [{"role": "user", "content": "hi"}]
    assert template_for(tokenizer_for(program.cfg.data.tokenizer)).render(messages).text == "hi<|end|>"


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_transformers_opens_an_export_by_its_model_type(name: str, tmp_path: Path) -> None:
    export_model(directory_of(name, tmp_path), tmp_path / "exported")
    assert json.loads((tmp_path / "exported/config.json").read_text())["model_type"] == name


def test_a_moved_file_is_named(tmp_path: Path) -> None:
    directory = directory_of("llama", tmp_path)
    (tmp_path / "llama.gguf").unlink()
    with pytest.raises(UserError, match=r"/llama.gguf: does not exist"):
        hf.load(directory)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": "mamba"}, 'general.architecture="mamba" is not supported; expected one of llama'),
        ({"tokenizer.ggml.pre": "viking"}, 'tokenizer.ggml.pre="viking" is not supported'),
        ({"tokenizer.ggml.model": "bert"}, 'tokenizer.ggml.model="bert" is not supported'),
        ({"llama.attention.causal": True}, "llama.attention.causal=true is not supported"),
        ({"split.count": 3}, "split into 3 files"),
        (
            {"llama.rope.dimension_count": 8, "llama.attention.key_length": 16},
            "rope.dimension_count=8 is not supported",
        ),
        ({"llama.attention.head_count": 1 << 31}, "num_attention_heads=2147483648 must be at most"),
        ({"llama.block_count": 100_000}, "num_hidden_layers=100000 must be"),
        ({"llama.attention.head_count_kv": [2, 1]}, r"num_key_value_heads=\[2, 1\] must be"),
        ({"llama.block_count": 3}, "missing tensors: model.layers.2"),
        ({"llama.block_count": 1}, "unexpected tensors: blk.1"),
        ({"tokenizer.ggml.merges": ["a b c"]}, "'a b c' does not result in a token"),
        ({"tokenizer.ggml.tokens": ["a", "b"]}, "has 2 tokens and tokenizer.ggml.token_type 320"),
        ({"tokenizer.ggml.tokens": ["a"] * 320}, "tokens 0 and 1 are equal"),
        ({"tokenizer.ggml.tokens": ["a" * 100_000, *map(str, range(319))]}, "token 0 has 100,000 characters"),
        ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens must be a list of str"),
    ],
)
def test_a_file_that_is_not_supported_is_refused_by_name(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        hf.load(directory_of("llama", tmp_path, changes=changes))
    assert not [path for path in tmp_path.glob("cache/*/*") if path.name.startswith(".")]


def test_control_characters_in_tokens_are_read_as_text(tmp_path: Path) -> None:
    tokens = ["\x1b[31m", "\x00", *map(str, range(318))]
    directory = directory_of("llama", tmp_path, changes={"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": []})
    assert tokenizer_for(directory).vocab_size == 320


def header(*parts: bytes, tensors: int = 0, settings: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, settings) + b"".join(parts)


def text(data: bytes, size: int | None = None) -> bytes:
    return struct.pack("<Q", len(data) if size is None else size) + data


HUGE = 1 << 62
HOSTILE = {
    "empty": b"",
    "not-gguf": b"\x80\x04pickle" * 9,
    "version": b"GGUF" + struct.pack("<IQQ", 77, 0, 0),
    "settings": header(settings=HUGE),
    "tensors": header(tensors=HUGE),
    "text": header(text(b"a", HUGE), settings=1),
    "array": header(text(b"a"), struct.pack("<IIQ", 9, 0, HUGE), bytes(64), settings=1),
    "array-of-texts": header(text(b"a"), struct.pack("<IIQ", 9, 8, HUGE), bytes(64), settings=1),
    "nested-arrays": header(text(b"a"), struct.pack("<I", 9), struct.pack("<IQ", 9, 1) * 5000, settings=1),
    "unknown-type": header(text(b"a"), struct.pack("<I", 99), bytes(8), settings=1),
    "not-utf-8": header(text(b"\xff\xfe"), struct.pack("<II", 4, 1), settings=1),
    "dimensions": header(text(b"a"), struct.pack("<I", 1 << 31), bytes(64), tensors=1),
    "shape": header(text(b"a"), struct.pack("<IQQIQ", 2, HUGE, HUGE, 0, 0), bytes(64), tensors=1),
    "offset": header(text(b"a"), struct.pack("<IQIQ", 1, 4, 0, (1 << 64) - 16), bytes(64), tensors=1),
    "quantization": header(text(b"a"), struct.pack("<IQIQ", 1, 32, 200, 0), bytes(64), tensors=1),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_header_is_refused_before_anything_is_allocated(name: str, tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(HOSTILE[name])
    with pytest.raises(UserError, match=r"x.gguf: damaged, truncated or not a GGUF file") as error:
        local_directory(str(file), "model.hf")
    assert "\n" not in str(error.value)


def test_a_header_of_very_many_values_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxmem.config.gguf.MAX_VALUES", 100)
    write_file("llama", tmp_path / "x.gguf")
    with pytest.raises(UserError, match="more than 100 values"):
        read_gguf(tmp_path / "x.gguf")


@pytest.mark.parametrize("share", [0.02, 0.3, 0.999])
def test_a_truncated_file_is_refused(share: float, tmp_path: Path) -> None:
    write_file("llama", tmp_path / "whole.gguf")
    data = (tmp_path / "whole.gguf").read_bytes()
    (tmp_path / "x.gguf").write_bytes(data[: int(len(data) * share)])
    with pytest.raises(UserError, match="truncated"):
        local_directory(str(tmp_path / "x.gguf"), "model.hf")


def test_a_quantization_that_the_package_does_not_decode_is_named(tmp_path: Path) -> None:
    integers = struct.pack("<IQIQ", 1, 16, 24, 0)  # I8
    architecture = text(b"general.architecture") + struct.pack("<I", 8) + text(b"llama")
    (tmp_path / "x.gguf").write_bytes(header(architecture, text(b"a"), integers, bytes(64), tensors=1, settings=1))
    with pytest.raises(UserError, match="does not decode I8, used by 'a'"):
        local_directory(str(tmp_path / "x.gguf"), "model.hf")


def test_an_absent_file_is_named() -> None:
    with pytest.raises(UserError, match=r"model.hf=missing.gguf does not exist"):
        load_config(run_of("missing.gguf"))


@pytest.mark.exhaustive
def test_a_run_as_a_file_for_llama_cpp(tmp_path: Path, compare) -> None:
    compare.write_directory("llama3.1", tmp_path / "given", vocab_size=264)
    (tmp_path / "given/tokenizer.json").write_text(json.dumps(byte_tokenizer()))
    (tmp_path / "given/tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ 'hi' }}"}))
    export_model(tmp_path / "given", tmp_path / "out.gguf", dtype="float32")
    read, given = read_gguf(tmp_path / "out.gguf"), load_file(tmp_path / "given/model.safetensors")
    settings, tensors = read.metadata, read.tensors
    assert read.architecture == "llama"
    assert settings["llama.context_length"] == 64
    assert settings["llama.attention.head_count_kv"] == 2
    assert settings["llama.rope.freq_base"] == 500000
    assert settings["tokenizer.ggml.tokens"][97] == "a"
    assert settings["tokenizer.ggml.token_type"][256:258] == [3, 5]
    assert settings["tokenizer.chat_template"] == "{{ 'hi' }}"
    np.testing.assert_array_equal(tensors["blk.1.ffn_down.weight"].data, given["model.layers.1.mlp.down_proj.weight"])
    halves = given["model.layers.0.self_attn.k_proj.weight"].reshape(2, 2, 4, 32)  # heads, halves, pairs
    np.testing.assert_array_equal(tensors["blk.0.attn_k.weight"].data.reshape(2, 4, 2, 32), halves.swapaxes(1, 2))
    assert len(tensors) == len(given) + 1
    factors = tensors["rope_freqs.weight"].data
    assert 1 < factors[0] < factors[-1] == 8
    with pytest.raises(UserError, match=r"out.gguf exists already"):
        export_model(tmp_path / "given", tmp_path / "out.gguf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["given", "out.gguf"]
    rope = load_config(run_of(str(tmp_path / "out.gguf"))).model.rope
    assert rope == load_config(run_of(str(tmp_path / "given"))).model.rope
    yarn = "model.rope={scaling: yarn, factor: 4.0, original_length: 32}"
    export_model(tmp_path / "given", tmp_path / "yarn.gguf", overrides=[yarn])
    assert read_gguf(tmp_path / "yarn.gguf").metadata["llama.context_length"] == 128


def test_a_file_has_the_template_of_the_data(tmp_path: Path, compare) -> None:
    compare.write_directory("llama3.1", tmp_path / "given", vocab_size=264)
    (tmp_path / "given/tokenizer.json").write_text(json.dumps(byte_tokenizer()))
    (tmp_path / "given/tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ 'hi' }}"}))
    (template := tmp_path / "template.jinja").write_text("{{ 'of the data' }}")
    model = hf.load(str(tmp_path / "given"))
    options = {"tokenizer": str(tmp_path / "given"), "chat_template": str(template)}
    hf.save_gguf(model, tmp_path / "out.gguf", **options)
    assert read_gguf(tmp_path / "out.gguf").metadata["tokenizer.chat_template"] == "{{ 'of the data' }}"
    template.unlink()
    with pytest.raises(UserError, match=r"template.jinja"):
        hf.save_gguf(model, tmp_path / "none.gguf", **options)


def test_a_file_has_a_large_tokenizer_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(byte_tokenizer()))
    monkeypatch.setattr("jaxmem.data.tokenizer.local_directory", lambda *_: str(tmp_path))
    monkeypatch.setattr("jaxmem.config.hf_values.MAX_BYTES", 64)  # of files of settings, not of a tokenizer
    model = build(Decoder(**SMALL), nnx.Rngs(0))
    hf.save_gguf(model, tmp_path / "x.gguf", tokenizer="org/name")
    assert read_gguf(tmp_path / "x.gguf").metadata["tokenizer.ggml.tokens"][97] == "a"


def split_by(regex: str, **changes: Any) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False, **changes}


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
AS_GPT2 = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}  # use_regex is true if absent
DIGITS = {"type": "Digits", "individual_digits": True}
CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
NEMO = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O = NEMO.replace("]+|[^", "]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^").replace(
    r"]*|\p{N}|", r"]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}|"
)
DEEPSEEK_V3 = (r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s+")


@pytest.mark.parametrize(
    ("steps", "name"),
    [
        ([AS_GPT2], "gpt-2"),
        ([DIGITS, AS_GPT2], "smollm"),  # SmolLM 1 and 2
        ([split_by(CL100K), BYTES], "llama-bpe"),  # Llama 3 and SmolLM3
        ([split_by(CL100K, behavior="Removed", invert=True), BYTES], "llama-bpe"),  # Phi-4
        ([split_by(CL100K.replace("{1,3}", "")), BYTES], "qwen2"),
        ([split_by(GPT4O, behavior="Removed", invert=True), BYTES], "gpt-4o"),
        ([split_by(NEMO), BYTES], "tekken"),
        ([*map(split_by, DEEPSEEK_V3), BYTES], None),
        ([split_by(r"[\r\n]"), split_by(r"\s?\p{L}+"), DIGITS, BYTES], None),  # DeepSeek Coder
        ([split_by(CL100K.replace(r"]?\p{L}+", r"]?[\p{L}\p{M}]+")), BYTES], None),  # Qwen 3.5
        ([DIGITS, BYTES], None),
        ([{**DIGITS, "individual_digits": False}, AS_GPT2], None),
        ([{**AS_GPT2, "add_prefix_space": True}], None),
        ([{"type": "Whitespace"}], None),
        ([], None),
    ],
)
def test_a_pre_tokenizer_has_the_name_of_one_that_splits_alike(steps: list[dict[str, Any]], name: str | None) -> None:
    assert pre_tokenizer_name({"type": "Sequence", "pretokenizers": steps}) == name
    if len(steps) == 1:
        assert pre_tokenizer_name(steps[0]) == name


def test_a_tokenizer_whose_pre_tokenizer_has_no_name_is_refused(tmp_path: Path) -> None:
    content = byte_tokenizer()
    content["model"]["vocab"]["ab"] = 257
    content["model"]["merges"] = [["a", "b"]]
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [*map(split_by, DEEPSEEK_V3), BYTES]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    model = build(Decoder(**SMALL), nnx.Rngs(0))
    with pytest.raises(UserError, match=r"does not support the pre-tokenizer of data.tokenizer="):
        hf.save_gguf(model, tmp_path / "x.gguf", tokenizer=str(tmp_path))


@pytest.mark.parametrize("has_prefix", [True, False])
def test_the_space_before_a_text_is_read_again(has_prefix: bool, tmp_path: Path) -> None:
    """Whatever words the vocabulary has: "first" and "always" are also names of settings."""
    tokens = CASES["llama-spm"][3]["tokens"]
    changes = {
        "tokenizer.ggml.tokens": [*tokens[:-2], "first", "always"],
        "tokenizer.ggml.add_space_prefix": has_prefix,
    }
    directory = Path(directory_of("llama-spm", tmp_path, changes=changes))
    hf.save_gguf(hf.load(directory), tmp_path / "again.gguf", tokenizer=str(directory))
    assert read_gguf(tmp_path / "again.gguf").metadata["tokenizer.ggml.add_space_prefix"] == has_prefix
    metaspace = {"type": "Metaspace", "replacement": "▁", "split": False}
    for scheme in ("first", "always", "never"):
        content = {"normalizer": None, "pre_tokenizer": {**metaspace, "prepend_scheme": scheme}}
        assert has_space_prefix(content) == (scheme != "never")


@pytest.mark.parametrize(
    ("kind", "stored", "worst"),
    [
        ("float16", "MOSTLY_F16", 3e-4),
        ("bfloat16", "MOSTLY_BF16", 2e-3),
        ("q8_0", "MOSTLY_Q8_0", 0.008),
        ("q4_1", "MOSTLY_Q4_1", 0.1),
    ],
)
def test_an_exported_file_is_read_again(kind: str, stored: str, worst: float, tmp_path: Path) -> None:
    model = build(Decoder(**SMALL, attention_bias=True), nnx.Rngs(0))
    hf.save_gguf(model, tmp_path / "x.gguf", tokenizer="bytes", kind=kind, length=128)
    metadata = read_gguf(tmp_path / "x.gguf").metadata
    assert metadata["general.architecture"] == "qwen2"
    assert LlamaFileType(metadata["general.file_type"]).name == stored
    again = hf.load(local_directory(str(tmp_path / "x.gguf"), "model.hf"))
    down, expected = (np.asarray(one.blocks.mlp.down.weight.get_value()) for one in (again, model))
    assert 0 < np.sqrt(np.mean((down - expected) ** 2)) < worst * np.std(expected)
    np.testing.assert_array_equal(again.norm.scale.get_value(), model.norm.scale.get_value())
    tokenizer = tokenizer_for(local_directory(str(tmp_path / "x.gguf"), "model.hf"))
    assert tokenizer.encode("a1é").tolist() == [97, 49, 195, 169]


def test_all_tokens_that_end_an_answer_are_read_again(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(byte_tokenizer()))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [256, 7, 9]}')
    model = build(Decoder(**SMALL), nnx.Rngs(0))
    hf.save_gguf(model, tmp_path / "x.gguf", tokenizer=str(tmp_path))
    assert tokenizer_for(local_directory(str(tmp_path / "x.gguf"), "model.hf")).ends == {256, 7, 9}
    hf.save_gguf(model, tmp_path / "y.gguf", tokenizer=str(tmp_path), ends=[8])  # the format has three
    assert tokenizer_for(local_directory(str(tmp_path / "y.gguf"), "model.hf")).ends == {256, 8, 9}


def test_biases_of_llama_are_read_again_in_the_order_of_their_rows(tmp_path: Path) -> None:
    model = build(Decoder(**SMALL, attention_bias=True, output_bias=True), nnx.Rngs(0))
    for layer in (model.blocks.attention.q, model.blocks.attention.k):
        layer.bias[...] = jnp.arange(layer.bias.size, dtype=jnp.float32).reshape(layer.bias.shape)
    hf.save_gguf(model, tmp_path / "x.gguf", tokenizer="bytes", kind="float32")
    assert read_gguf(tmp_path / "x.gguf").metadata["general.architecture"] == "llama"
    again = hf.load(local_directory(str(tmp_path / "x.gguf"), "model.hf"))
    jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(nnx.state(again)), nnx.to_pure_dict(nnx.state(model)))


def test_rows_that_are_no_multiple_of_a_block_are_float16(tmp_path: Path) -> None:
    model = build(Decoder(**{**SMALL, "mlp": 80}), nnx.Rngs(0))
    hf.save_gguf(model, tmp_path / "x.gguf", tokenizer="bytes", kind="q8_0")
    tensors = read_gguf(tmp_path / "x.gguf").tensors
    assert tensors["blk.0.ffn_down.weight"].kind.name == "F16"
    assert tensors["blk.0.ffn_up.weight"].kind.name == "Q8_0"


def test_values_that_float16_cannot_store_are_refused(tmp_path: Path) -> None:
    model = build(Decoder(**SMALL), nnx.Rngs(0))
    model.blocks.mlp.up.weight[...] = model.blocks.mlp.up.weight[...].at[0, 0, 0].set(1e5)
    with pytest.raises(UserError, match=r"ffn_up\.weight has values that are too large for float16; use --dtype bf"):
        hf.save_gguf(model, tmp_path / "x.gguf", tokenizer="bytes", kind="float16")
    with pytest.raises(UserError, match=r"up_proj\.weight has values that are too large for float16"):
        hf.save(model, tmp_path / "x", tokenizer="bytes", dtype="float16")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ({}, {"kind": "q4"}, "--dtype q4 is not a GGUF format; did you mean q4_"),
        ({}, {"kind": "q4_k"}, "does not write K-quants; .* run llama-quantize .* Q4_K of llama.cpp"),
        ({}, {"kind": "Q5_K_M"}, "does not write K-quants"),
        ({}, {"tokenizer": None}, "set data.tokenizer"),
        ({"qk_norm": True, "attention_bias": True}, {}, "does not support model.qk_norm with biases"),
        (
            {"qk_norm": True, "rope": {"scaling": "llama3", "factor": 8.0}},
            {},
            "qwen3 does not support model.rope.scaling=llama3",
        ),
        ({"logit_soft_cap": 30.0}, {}, "does not support model.logit_soft_cap=30"),
        (
            {"rope": {"scaling": "yarn", "factor": 8.0, "mscale": 0.7, "mscale_all_dim": 0.4}},
            {},
            r"does not support model.rope.mscale=0.7 with mscale_all_dim=0.4; export",
        ),
        (
            {"kv_heads": 4, "latent": {"kv_rank": 8, "rope_dim": 8, "value_dim": 16}},
            {},
            "does not support model.latent; export",
        ),
        ({"vocab": 200}, {}, "has 257 tokens, more than model.vocab=200"),
    ],
)
def test_what_cannot_be_written(model: dict[str, Any], options: dict[str, Any], message: str, tmp_path: Path) -> None:
    network = build(Decoder(**{**SMALL, **model}), nnx.Rngs(0))
    with pytest.raises(UserError, match=message):
        hf.save_gguf(network, tmp_path / "x.gguf", **{"tokenizer": "bytes", **options})
    assert not list(tmp_path.iterdir())
