"""Files that are not what they say, and directories that are not whole: one line each, before anything is allocated."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxmem import hf
from jaxmem.errors import UserError
from jaxmem.hf.tensors import Given, Tensors, read_header, write_tensors

X = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(4, np.float16)}


def file_of(place: Path, header: object, values: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file = place / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(text)) + text + values)
    return file


def said(dtype: str = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    return {"a": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"", "damaged header"),
        (b"[1]", "damaged header: no object"),
        (b"\xff{", "damaged header"),
        (b"[" * 100_000, "damaged header"),
        (b'{"a": 1, "a": 2}', "a name stands there twice"),
        ({"a": {"dtype": "F32"}}, "damaged header: 'shape'"),
        (said(shape=[2**60], offsets=[0, 2**62]), "truncated: 8 bytes of values, its header says"),
        (said(shape=[2**60]), "does not take 8 bytes"),
        (said(shape=[-2]), "at least 0"),
        (said(shape=[2.0]), "whole numbers"),
        (said(shape="ab"), "whole numbers"),
        (said(offsets=[0, 4]), "does not take 4 bytes"),
        (said(offsets=[8, 0]), "does not take -8 bytes"),
        (said(offsets=[4, 12]), "begins at byte 4"),
        (said(shape=[4], offsets=[0, 16]), "truncated: 8 bytes of values, its header says 16"),
        (said(dtype="PICKLE"), "'PICKLE' is not known"),
    ],
)
def test_a_damaged_header_is_told(tmp_path: Path, header: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_header(file_of(tmp_path, header, b"12345678"))


@pytest.mark.parametrize("content", [b"", b"123", struct.pack("<Q", 2**60) + b"{}", struct.pack("<Q", 2**40) + b"{}"])
def test_what_is_no_such_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(UserError, match="truncated or no safetensors file"):
        read_header(tmp_path / "x")


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    save_file(X, tmp_path / "x")
    whole = (tmp_path / "x").read_bytes()
    assert set(read_header(tmp_path / "x")) == {"a", "b"}
    for length in range(len(whole)):
        (tmp_path / "y").write_bytes(whole[:length])
        with pytest.raises(UserError):
            read_header(tmp_path / "y")


@pytest.mark.parametrize("shard", [1, 30, 1 << 20])
def test_what_is_written_is_what_the_library_reads(tmp_path: Path, shard: int) -> None:
    given = [Given(name, x.dtype, x.shape, lambda x=x: x) for name, x in X.items()]
    write_tensors(tmp_path, given, shard)
    found = {name: x for file in tmp_path.glob("*.safetensors") for name, x in load_file(file).items()}
    assert found.keys() == X.keys()
    for name, x in X.items():
        assert found[name].dtype == x.dtype
        np.testing.assert_array_equal(found[name], x)
    with Tensors(tmp_path) as tensors:
        np.testing.assert_array_equal(tensors.read("a", (slice(1, 2), slice(0, 2))), X["a"][1:2, 0:2])


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


def absent_file(place: Path) -> None:
    index(place, split(place))
    (place / "model-00002-of-00002.safetensors").unlink()


def no_index(place: Path) -> None:
    split(place)


def outside(place: Path) -> None:
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
        (tensors(lambda t: t.pop("model.layers.1.mlp.up_proj.weight")), "missing: model.layers.1.mlp.up_proj.weight$"),
        (tensors(lambda t: t.update(odd=t["model.norm.weight"])), "not of this model: odd$"),
        (tensors(lambda t: t.update({"lm_head.weight": np.ones((40, 31), np.float32)})), r"is \[40, 31\].*\[40, 32\]"),
        (tensors(lambda t: t.update({"lm_head.weight": np.ones((40, 32), np.int8)})), "is I8; weights are read as F32"),
        (config(intermediate_size=64), r"down_proj.weight is \[32, 48\], but config.json makes it \[32, 64\]"),
        (config(num_hidden_layers=1), "not of this model: model.layers.1.input_layernorm.weight, .* and 5 more"),
        (config(architectures=["MambaForCausalLM"]), "MambaForCausalLM is not known; known: LlamaForCausalLM"),
        (config(hidden_act="gelu"), 'hidden_act "gelu" is not supported, only "silu"'),
        (config(quantization_config={"bits": 4}), "quantization_config"),
        (config(rope_scaling={"rope_type": "dynamic", "factor": 2.0}), "rope_type 'dynamic' is not supported"),
        (config(rope_scaling={"rope_type": "llama3", "factor": 2.0}), "low_freq_factor: must be a number"),
        (config(vocab_size=None), "vocab_size: must be a whole number"),
        (lambda place: (place / "config.json").write_text("{"), "no valid JSON"),
        (lambda place: (place / "config.json").unlink(), "no config.json is there"),
        (shutil.rmtree, "no such directory"),
        (without, r"no \*.safetensors is there"),
        (absent_file, "points to files that are not there: model-00002-of-00002.safetensors"),
        (outside, "is not the name of a file beside it"),
        (no_index, "without model.safetensors.index.json"),
        (pickled, "only pickled weights .pytorch_model.bin., .*save_pretrained"),
    ],
)
def test_a_directory_that_is_not_whole(
    tmp_path: Path, directories: Path, spoil: Callable[[Path], object], message: str
) -> None:
    place = tmp_path / "model"
    shutil.copytree(directories / "llama3", place)
    spoil(place)
    with pytest.raises(UserError, match=message) as told:
        hf.load(place)
    assert "\n" not in str(told.value)


def test_layers_of_two_kinds_are_refused(tmp_path: Path, directories: Path) -> None:
    place = tmp_path / "model"
    shutil.copytree(directories / "qwen2-window", place)
    config(max_window_layers=1)(place)
    with pytest.raises(UserError, match="layers of 2 kinds"):
        hf.load(place)


def test_several_files_are_one_model(tmp_path: Path, directories: Path) -> None:
    place = tmp_path / "model"
    shutil.copytree(directories / "llama3", place)
    index(place, split(place))
    found = hf.load(place).norm.scale.get_value()
    np.testing.assert_array_equal(found, hf.load(directories / "llama3").norm.scale.get_value())
