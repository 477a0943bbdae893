"""Files that are not what they say, and directories that are not whole: one line each, before anything is allocated."""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxmem import hf
from jaxmem.config.hf_modules import Fused
from jaxmem.errors import UserError
from jaxmem.hf.tensors import OutputTensor, Tensors, open_file, write_tensors

X = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(4, np.float16)}


def file_of(place: Path, header: object, values: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file = place / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(text)) + text + values)
    return file


def header_of(dtype: str = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    return {"a": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"", "invalid JSON"),
        (b"[1]", "invalid type: sequence"),
        (b"\xff{", "invalid UTF-8"),
        (b"\xef\xbb\xbf" + json.dumps(header_of()).encode(), "invalid JSON"),
        (b"[" * 100_000, "invalid JSON"),
        (b'{"a": 1, "a": 2}', "invalid JSON"),
        ({"a": {"dtype": "F32"}}, "missing field `shape`"),
        (header_of() | {"__metadata__": {"format": 1}}, "expected a string"),
        (header_of(shape=[2**60], offsets=[0, 2**62]), "overflow"),
        (header_of(shape=[2**60]), "overflow"),
        (header_of(shape=[-2]), "expected usize"),
        (header_of(shape=[2.0]), "expected usize"),
        (header_of(shape="ab"), "expected a sequence"),
        (header_of(shape=[1] * 1_000_000), "invalid shape"),
        (header_of(offsets=[0, 4]), "invalid shape, data type, or offset"),
        (header_of(offsets=[8, 0]), "invalid offset"),
        (header_of(offsets=[4, 12]), "invalid offset"),
        (header_of(shape=[4], offsets=[0, 16]), "file not fully covered"),
        (header_of(dtype="PICKLE"), "unknown variant `PICKLE`"),
    ],
)
def test_a_damaged_header_is_refused_with_the_name_of_its_file(tmp_path: Path, header: object, message: str) -> None:
    with pytest.raises(UserError, match=rf"model\.safetensors: damaged, truncated or not .*{message}"):
        open_file(file_of(tmp_path, header, b"12345678"))


@pytest.mark.parametrize("content", [b"", b"123", struct.pack("<Q", 2**60) + b"{}", struct.pack("<Q", 2**40) + b"{}"])
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(UserError, match="x: damaged, truncated or not a safetensors file"):
        open_file(tmp_path / "x")


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    save_file(X, tmp_path / "x")
    whole = (tmp_path / "x").read_bytes()
    assert set(open_file(tmp_path / "x").keys()) == {"a", "b"}
    for length in range(len(whole)):
        (tmp_path / "y").write_bytes(whole[:length])
        with pytest.raises(UserError, match="truncated"):
            open_file(tmp_path / "y")


@pytest.mark.parametrize("shard", [1, 30, 1 << 20])
def test_what_is_written_is_what_the_library_reads(tmp_path: Path, shard: int) -> None:
    given = [OutputTensor(name, x.dtype, x.shape, lambda x=x: x) for name, x in X.items()]
    write_tensors(tmp_path, given, shard)
    found = {name: x for file in tmp_path.glob("*.safetensors") for name, x in load_file(file).items()}
    assert found.keys() == X.keys()
    for name, x in X.items():
        assert found[name].dtype == x.dtype
        np.testing.assert_array_equal(found[name], x)
    part = Tensors(tmp_path).read("a", X["a"].shape, (slice(1, 2), slice(0, 2)))
    np.testing.assert_array_equal(part, X["a"][1:2, 0:2])


@pytest.mark.parametrize("is_interleaved", [False, True], ids=["joined", "interleaved"])
def test_a_device_reads_its_part_of_a_fused_tensor(tmp_path: Path, is_interleaved: bool) -> None:
    gate, up = np.arange(48, dtype=np.float32).reshape(2, 8, 3)
    rows = np.stack([gate, up], axis=1).reshape(16, 3) if is_interleaved else np.concatenate([gate, up])
    save_file({"mlp.fused": rows}, tmp_path / "model.safetensors")
    tensors = Tensors(tmp_path)
    shapes = {"mlp.gate": gate.shape, "mlp.up": up.shape}
    tensors.split({"fused": Fused(("gate", "up"), dim=0, is_interleaved=is_interleaved)}, shapes)
    for name, values in {"mlp.gate": gate, "mlp.up": up}.items():
        part = tensors.read(name, values.shape, (slice(4, 6), slice(1, 3)))
        np.testing.assert_array_equal(part, values[4:6, 1:3])


def changed(place: Path, change: Callable[[dict[str, np.ndarray]], None]) -> None:
    tensors = load_file(place / "model.safetensors")
    change(tensors)
    save_file(tensors, place / "model.safetensors")


def split(place: Path) -> dict[str, str]:
    tensors = load_file(place / "model.safetensors")
    (place / "model.safetensors").unlink()
    weight_map = {}
    for number, name in enumerate(tensors):
        file = f"model-{number % 2 + 1:05}-of-00002.safetensors"
        weight_map[name] = file
    for file in set(weight_map.values()):
        save_file({name: x for name, x in tensors.items() if weight_map[name] == file}, place / file)
    return weight_map


def index(place: Path, weight_map: object) -> None:
    (place / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def without(place: Path) -> None:
    (place / "model.safetensors").unlink()


def absent_files(place: Path) -> None:
    weight_map = split(place)
    index(place, weight_map)
    for name in set(weight_map.values()):
        (place / name).unlink()


def no_index(place: Path) -> None:
    split(place)


def outside(place: Path) -> None:
    without(place)
    index(place, {"x": "../model.safetensors"})


def pickled(place: Path) -> None:
    without(place)
    (place / "pytorch_model.bin").write_bytes(b"")


def config(**keys: object) -> Callable[[Path], None]:
    def write(place: Path) -> None:
        file = place / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | keys))

    return write


def tensors(change: Callable[[dict[str, np.ndarray]], None]) -> Callable[[Path], None]:
    return lambda place: changed(place, change)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            tensors(lambda t: t.pop("model.layers.1.mlp.up_proj.weight")),
            "missing tensors: .*layers.1.mlp.up_proj.weight;",
        ),
        (tensors(lambda t: t.update(odd=t["model.norm.weight"])), "unexpected tensors: odd;"),
        (
            tensors(lambda t: t.update({"lm_head.weight": np.ones((40, 31), np.float32)})),
            r"shape \[40, 31\].*\[40, 32\]",
        ),
        (
            tensors(lambda t: t.update({"lm_head.weight": np.ones((40, 32), np.int8)})),
            "dtype I8; save the model in F32",
        ),
        (config(intermediate_size=64), r"down_proj.weight has shape \[32, 48\], but config.json requires \[32, 64\]"),
        (config(num_hidden_layers=1), "unexpected tensors: model.layers.1.input_layernorm.weight, .* and 5 more"),
        (
            config(architectures=["MambaForCausalLM"]),
            "MambaForCausalLM is not supported; expected one of LlamaForCausalLM",
        ),
        (
            config(model_type="mistral"),
            "model_type=mistral does not match architectures=LlamaForCausalLM; use model_type=llama",
        ),
        (config(hidden_act="gelu"), 'hidden_act="gelu" is not supported; expected "silu"'),
        (config(quantization_config={"bits": 4}), "quantization_config"),
        (config(rope_scaling={"rope_type": "dynamic", "factor": 2.0}), 'rope_type="dynamic" is not supported'),
        (config(rope_scaling={"rope_type": "llama3", "factor": 2.0}), "low_freq_factor is missing; expected a number"),
        (config(vocab_size=2**60), "vocab_size=.* must be at most 2147483647"),
        (config(num_hidden_layers=10**9), "num_hidden_layers=1000000000 must be at most 10000"),
        (config(rope_scaling={"rope_type": "yarn", "factor": 2.0, "mscale": 1.0}), "rope_scaling.mscale=1.0 is not"),
        (config(rope_parameters={"partial_rotary_factor": 0.5}), "partial_rotary_factor=0.5 is not supported"),
        (config(dtype="float8_e4m3fn"), 'dtype="float8_e4m3fn" is not supported; expected "float32"'),
        (config(residual_multiplier=0.5), "residual_multiplier=0.5 is not supported"),
        (
            config(rope_scaling={"type": "linear", "factor": 2.0, "mrope_section": [2]}),
            r"rope_scaling.mrope_section=\[2",
        ),
        (config(attention_bias="no"), 'attention_bias="no" must be true or false'),
        (
            tensors(lambda t: t["model.layers.1.mlp.up_proj.weight"].fill(np.nan)),
            "layers.1.mlp.up_proj.weight contains",
        ),
        (tensors(lambda t: t["model.norm.weight"].fill(np.inf)), "model.norm.weight contains NaN or infinite values"),
        (config(vocab_size=None), "vocab_size=null must be a whole number"),
        (lambda place: (place / "config.json").write_text("{"), "invalid JSON"),
        (lambda place: (place / "config.json").unlink(), "contains no config.json"),
        (shutil.rmtree, "model.hf=.* does not exist"),
        (without, r"contains no \*.safetensors"),
        (absent_files, "points to missing files: model-00001-of-00002.safetensors, model-00002-of-00002.safetensors;"),
        (outside, "is not the name of a file"),
        (no_index, "neither model.safetensors.index.json nor"),
        (pickled, "only pickled weights .pytorch_model.bin., .*save_pretrained"),
    ],
)
def test_an_incomplete_directory_is_refused(
    tmp_path: Path, directories: Path, spoil: Callable[[Path], object], message: str
) -> None:
    place = tmp_path / "model"
    shutil.copytree(directories / "llama3", place)
    spoil(place)
    with pytest.raises(UserError, match=message) as refused:
        hf.load(place)
    assert "\n" not in str(refused.value)


def test_a_weight_outside_of_stacks_needs_no_memory_before_it_is_read(
    directories: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An array of zeros, into which the tensor is written, would double the peak of the largest weights."""
    shapes = {"model.embed_tokens.weight": (40, 32), "lm_head.weight": (32, 40)}
    arrays_before = {}
    read = Tensors.read

    def spy(tensors: Tensors, name: str, *args: Any) -> np.ndarray:
        if name in shapes:
            arrays_before[name] = sum(x.shape == shapes[name] for x in jax.live_arrays())
        return read(tensors, name, *args)

    monkeypatch.setattr(Tensors, "read", spy)
    existing = {name: sum(x.shape == shape for x in jax.live_arrays()) for name, shape in shapes.items()}
    hf.load(directories / "llama3")
    assert arrays_before == existing


def test_a_file_with_all_weights_is_read_beside_an_index(tmp_path: Path, directories: Path) -> None:
    """Of a model that was saved into the directory of another one. transformers reads this file too."""
    place = tmp_path / "model"
    shutil.copytree(directories / "llama3", place)
    weight_map = split(place)
    index(place, weight_map)
    for file in set(weight_map.values()):
        save_file({name: 0 * x for name, x in load_file(place / file).items()}, place / file)
    shutil.copy(directories / "llama3/model.safetensors", place)
    read, expected = (hf.load(model).embedding.weight[...] for model in (place, directories / "llama3"))
    np.testing.assert_array_equal(read, expected)


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("gemma2", {"layer_types": ["chunked_attention"] * 3}, "layer_types=.* must be .*sliding_attention"),
        ("gemma2", {"layer_types": ["full_attention"] * 2}, "layer_types has 2 values; expected num_hidden_layers=3"),
        ("gemma2", {"final_logit_softcapping": -1}, "final_logit_softcapping=-1 must be above 0"),
        (
            "gemma2",
            {"hidden_activation": "gelu"},
            'hidden_activation="gelu" is not supported; expected "gelu_py',
        ),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention=true is not supported"),
        ("mistral", {"layer_types": ["full_attention"] * 2}, "layer_types: .* does not support full_attention"),
        ("llama3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0 is not supported"),
    ],
)
def test_settings_of_layers_are_refused(
    tmp_path: Path, directories: Path, name: str, keys: dict[str, object], message: str
) -> None:
    place = tmp_path / "model"
    place.mkdir()
    shutil.copy(directories / name / "config.json", place)
    config(**keys)(place)
    with pytest.raises(UserError, match=message) as refused:
        hf.load(place)
    assert "\n" not in str(refused.value)


def test_several_files_are_one_model(tmp_path: Path, directories: Path) -> None:
    place = tmp_path / "model"
    shutil.copytree(directories / "llama3", place)
    index(place, split(place))
    found = hf.load(place).norm.scale.get_value()
    np.testing.assert_array_equal(found, hf.load(directories / "llama3").norm.scale.get_value())
