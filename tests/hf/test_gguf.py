"""GGUF files: settings, tokenizer and tensors, and blocks as the package gguf decodes them."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxmem import hf
from jaxmem.config import Decoder
from jaxmem.errors import UserError
from jaxmem.hf.files import byte_tokenizer
from jaxmem.hf.gguf_blocks import FORMATS, encode
from jaxmem.inference.export import export_model, import_model
from jaxmem.models import build
from tests.hf.gguf_reference import KINDS, numbers

NUMBERS = {4: "I", 5: "i", 6: "f", 7: "?"}
SMALL = {"vocab": 264, "layers": 2, "embed": 64, "mlp": 256, "heads": 4, "kv_heads": 2, "head_dim": 16}


class Reader:
    """The settings and the tensors (name: shape, type, bytes) of a GGUF file."""

    def __init__(self, file: Path) -> None:
        self.data, self.at = file.read_bytes(), 4
        version, tensors, settings = self.take("IQQ")
        assert self.data[:4] == b"GGUF"
        assert version == 3
        self.settings = {self.text(): self.value(*self.take("I")) for _ in range(settings)}
        infos = [(self.text(), self.take(f"{self.take('I')[0]}Q")[::-1], *self.take("IQ")) for _ in range(tensors)]
        start = -(-self.at // 32) * 32
        self.tensors = {}
        for name, shape, kind, offset in infos:
            form = next(one for one in FORMATS.values() if one.type_number == kind)
            size = int(np.prod(shape)) // form.block * form.nbytes
            assert offset % 32 == 0
            assert start + offset + size <= len(self.data)
            self.tensors[name] = shape, form, self.data[start + offset :][:size]

    def take(self, form: str) -> tuple[Any, ...]:
        found = struct.unpack_from(f"<{form}", self.data, self.at)
        self.at += struct.calcsize(f"<{form}")
        return found

    def text(self) -> str:
        size = self.take("Q")[0]
        self.at += size
        return self.data[self.at - size : self.at].decode()

    def value(self, kind: int) -> Any:
        if kind == 8:
            return self.text()
        if kind != 9:
            return self.take(NUMBERS[kind])[0]
        kind, count = self.take("IQ")
        return [self.value(kind) for _ in range(count)]

    def array(self, name: str) -> np.ndarray:
        shape, form, data = self.tensors[name]
        return decode(data, form).reshape(shape)


def decode(data: bytes, form: Any) -> np.ndarray:
    if form.block == 1:
        return np.frombuffer(data, np.float32 if form.nbytes == 4 else np.float16).astype(np.float32)
    blocks = np.frombuffer(data, np.uint8).reshape(-1, form.nbytes)
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    if form is FORMATS["q8_0"]:
        return scale * blocks[:, 2:].view(np.int8)
    if form is FORMATS["q4_0"]:
        return scale * (np.concatenate([blocks[:, 2:] & 15, blocks[:, 2:] >> 4], axis=1).astype(np.float32) - 8)
    least = blocks[:, 2:4].copy().view(np.float16).astype(np.float32)
    low, high = blocks[:, 4:12], blocks[:, 12:16]
    scales = np.concatenate([low[:, :4] & 63, high & 15 | low[:, :4] >> 6 << 4], axis=1)
    offsets = np.concatenate([low[:, 4:] & 63, high >> 4 | low[:, 4:] >> 6 << 4], axis=1)
    pairs = blocks[:, 16:].reshape(-1, 4, 1, 32)
    codes = np.concatenate([pairs & 15, pairs >> 4], axis=2).reshape(-1, 8, 32)
    return (scale * scales)[..., None] * codes - (least * offsets)[..., None]


@pytest.mark.parametrize(("kind", "worst"), [("q8_0", 0.008), ("q4_0", 0.13), ("q4_k", 0.07)])
def test_blocks(kind: str, worst: float) -> None:
    recorded = json.loads((Path(__file__).parent / "data/gguf.json").read_text())[kind]
    np.testing.assert_allclose(
        decode(bytes.fromhex(recorded["bytes"]), FORMATS[kind]).ravel(), recorded["values"], rtol=1e-6
    )
    x = numbers()
    off = decode(encode(x, FORMATS[kind]), FORMATS[kind]).reshape(x.shape) - x
    assert np.sqrt(np.mean(off**2)) < worst
    zeros = np.zeros((1, 256), np.float32)
    np.testing.assert_array_equal(decode(encode(zeros, FORMATS[kind]), FORMATS[kind]).ravel(), zeros[0])
    assert set(KINDS) == {name for name, form in FORMATS.items() if form.block > 1}


def test_a_run_as_a_file_for_llama_cpp(tmp_path: Path, compare) -> None:
    compare.write_directory("llama3.1", tmp_path / "given", vocab_size=264)
    (tmp_path / "given/tokenizer.json").write_text(json.dumps(byte_tokenizer()))
    (tmp_path / "given/tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ 'hi' }}"}))
    import_model(tmp_path / "given", tmp_path / "run")
    export_model(tmp_path / "run", tmp_path / "out.gguf", dtype="float32")
    read, given = Reader(tmp_path / "out.gguf"), load_file(tmp_path / "given/model.safetensors")
    settings = read.settings
    assert settings["general.architecture"] == "llama"
    assert settings["llama.context_length"] == 64
    assert settings["llama.attention.head_count_kv"] == 2
    assert settings["llama.rope.freq_base"] == 500000
    assert settings["tokenizer.ggml.tokens"][97] == "a"
    assert settings["tokenizer.ggml.token_type"][256:258] == [3, 5]
    assert settings["tokenizer.chat_template"] == "{{ 'hi' }}"
    np.testing.assert_array_equal(read.array("blk.1.ffn_down.weight"), given["model.layers.1.mlp.down_proj.weight"])
    np.testing.assert_array_equal(read.array("blk.0.attn_norm.weight"), given["model.layers.0.input_layernorm.weight"])
    halves = given["model.layers.0.self_attn.k_proj.weight"].reshape(2, 2, 4, 32)  # heads, halves, pairs
    np.testing.assert_array_equal(read.array("blk.0.attn_k.weight").reshape(2, 4, 2, 32), halves.swapaxes(1, 2))
    assert len(read.tensors) == len(given) + 1
    factors = read.array("rope_freqs.weight")
    assert 1 < factors[0] < factors[-1] == 8
    with pytest.raises(UserError, match=r"out.gguf exists already"):
        export_model(tmp_path / "run", tmp_path / "out.gguf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["given", "out.gguf", "run"]


def test_quantized_matrices_and_what_falls_back(tmp_path: Path) -> None:
    from flax import nnx

    model = build(Decoder(**SMALL, attention_bias=True), nnx.Rngs(0))
    hf.save_gguf(model, tmp_path / "x.gguf", tokenizer="bytes", kind="q4_k", length=128)
    read = Reader(tmp_path / "x.gguf")
    kinds = {name: next(key for key, form in FORMATS.items() if form is one[1]) for name, one in read.tensors.items()}
    assert read.settings["general.architecture"] == "qwen2"
    assert kinds["blk.0.ffn_down.weight"] == "q4_k"
    assert kinds["blk.0.attn_q.weight"] == "q8_0"
    assert kinds["blk.0.attn_q.bias"] == kinds["output_norm.weight"] == "float32"
    down = np.asarray(model.blocks.mlp.down.weight.get_value())[1].T
    off = read.array("blk.1.ffn_down.weight") - down
    assert np.sqrt(np.mean(off**2)) < 0.08 * np.std(down)


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ({}, {"kind": "q4"}, "--dtype q4 is not a GGUF format; did you mean q4_"),
        ({}, {"tokenizer": None}, "set data.tokenizer"),
        ({"qk_norm": True, "attention_bias": True}, {}, "does not support model.qk_norm with biases"),
        (
            {"qk_norm": True, "rope": {"scaling": "llama3", "factor": 8.0}},
            {},
            "qwen3 does not support model.rope.scaling=llama3",
        ),
        ({"logit_soft_cap": 30.0}, {}, "does not support model.logit_soft_cap=30"),
        ({"vocab": 200}, {}, "has 257 tokens, more than model.vocab=200"),
    ],
)
def test_what_cannot_be_written(model: dict[str, Any], options: dict[str, Any], message: str, tmp_path: Path) -> None:
    from flax import nnx

    network = build(Decoder(**{**SMALL, **model}), nnx.Rngs(0))
    with pytest.raises(UserError, match=message):
        hf.save_gguf(network, tmp_path / "x.gguf", **{"tokenizer": "bytes", **options})
    assert not list(tmp_path.iterdir())
