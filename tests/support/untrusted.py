"""Everything that jaxmem reads and somebody else may have written: good examples of each, and what reads them."""

import atexit
import io
import json
import shutil
import struct
import tempfile
import warnings
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from gguf import GGUFWriter
from PIL import Image

from jaxmem.checkpoint.manager import Checkpoints
from jaxmem.config import Decoder, load_config
from jaxmem.config.gguf import directory_contents
from jaxmem.config.hugging_face import decoder_fields, fields_of
from jaxmem.config.peft import adapter_fields, base_directory
from jaxmem.data.chat import ChatEncoder
from jaxmem.data.chat_forms import chat_of
from jaxmem.data.chat_template import ChatTemplate
from jaxmem.data.images import IMAGE_FORMATS, ImageForm, read_image
from jaxmem.data.jsonl import JsonRecords, JsonTexts, parse_object
from jaxmem.data.tokenizer import Bytes, tokenizer_for
from jaxmem.hf.files import byte_tokenizer
from jaxmem.hf.tensors import Tensors, open_file
from jaxmem.planning.targets import parse_target
from tests.support.records import open_records

ROOT = Path(__file__).parents[2]
OVERRIDES = ("mesh.fsdp=8", "memory.remat={save: [mlp_up]}", "objective.z_loss=1e-4", "model={preset: tiny}")
TARGETS = ("h100-80gb:16x8", "cpu:8", "rtx4090-24gb")
GPU = """memory_gib: 24
compute_capability: 8.9
bandwidth: 1.0e12
host_memory_gib: 64
multiprocessors: 128
bf16_flops: 1.6e14
link: 2.5e10
network: 1.2e10
"""
HEADER = {"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, "__metadata__": {"format": "pt"}}
INDEX = {"metadata": {}, "weight_map": {"a": "one.safetensors"}}
ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 257,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "rope_scaling": {**ROPE, "original_max_position_embeddings": 8192},
}
QUANTIZED = (
    {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True},
    {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "llm_int8_skip_modules": ["lm_head", "layers.0.mlp"]},
    {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "ignore": ["lm_head", "re:.*self_attn.*"],
        "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 32, "strategy": "group"}}},
    },
)
ADAPTER = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}
ADAPTER["base_model_name_or_path"] = "somewhere"
CONVERSATIONS = (
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]},
    {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}], "system": "short"},
    {"instruction": "say", "input": "it", "output": "it", "history": [["a", "b"]]},
    {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {"role": "assistant", "content": None, "weight": 0, "tool_calls": [{"name": "f", "arguments": "{}"}]},
            {"role": "assistant", "content": "x", "reasoning_content": "y"},
        ],
        "tools": [{"type": "function", "function": {"name": "f"}}],
    },
)
TEMPLATE = "{{ tools }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ m.tool_calls }}\n{% endfor %}"
# Of a checkpoint: jaxmem's own record, Orbax's description of the arrays, TensorStore's of its files.
CHECKPOINT = {"record": "1/run/metadata", "metadata": "1/state/_METADATA", "manifest": "1/state/manifest.ocdbt"}


class Kind(NamedTuple):
    """One kind of input: good examples, and what reads one, in a directory. `slow`: takes a tenth of a second."""

    examples: list[bytes]
    read: Callable[[bytes, Path], object]
    slow: bool = False


def kinds() -> dict[str, Kind]:
    configs = [file.read_bytes() for file in sorted((ROOT / "configs").glob("*.yaml"))]
    tensors = safetensors(encoded(HEADER), bytes(24))
    lines = b"\n".join(encoded({"text": text}) for text in ("one", "two", "three" * 50))
    encoder = ChatEncoder(Bytes(), ChatTemplate(TEMPLATE, "here", {}))

    def file(name: str, read: Callable[[Path], object], *examples: bytes) -> Kind:
        """Of a file, which is written first."""
        return Kind(list(examples), lambda data, at: read(_written(at / name, data)))

    def text(read: Callable[[str], object], *examples: str) -> Kind:
        return Kind([one.encode() for one in examples], lambda data, _: read(data.decode(errors="replace")))

    quantized = [encoded({**LLAMA, "quantization_config": one}) for one in QUANTIZED]

    def read_index(index: Path) -> Tensors:
        _written(index.with_name("one.safetensors"), tensors)
        return Tensors(index.parent)

    return {
        "config": file("x.yaml", load_config, *configs),
        "override": Kind(
            [one.encode() for one in OVERRIDES],
            lambda data, _: load_config(ROOT / "configs/demo.yaml", [data.decode(errors="surrogateescape")]),
        ),
        "target": text(parse_target, *TARGETS),
        "target file": file("x.yaml", lambda path: parse_target(str(path)), GPU.encode()),
        "safetensors": file("x.safetensors", open_file, tensors),
        "gguf": file("x.gguf", directory_contents, _gguf()),
        "safetensors index": file("model.safetensors.index.json", read_index, encoded(INDEX)),
        "model config.json": file(
            "config.json", lambda path: decoder_fields(str(path.parent)), encoded(LLAMA), *quantized
        ),
        "adapter_config.json": file("adapter_config.json", _read_adapter, encoded(ADAPTER)),
        "tokenizer.json": file(
            "tokenizer.json",
            lambda path: tokenizer_for(str(path)).encode_with_offsets("some text"),
            encoded(byte_tokenizer()),
        ),
        "chat line": Kind(
            [encoded(one) for one in CONVERSATIONS],
            lambda data, _: _read_chat(encoder, data),
        ),
        "chat template": text(
            lambda source: ChatTemplate(source, "here", {}).render(CONVERSATIONS[0]["messages"]), TEMPLATE
        ),
        "jsonl": file("x.jsonl", _read_lines, lines),
        "parquet": file("x.parquet", _read_lines, *map(_parquet, ("none", "snappy"))),
        "arrow": file("x.arrow", _read_lines, *map(_arrow, (pa.ipc.new_stream, pa.ipc.new_file))),
        "arrow rows": file("x.arrow", _read_rows, *map(_arrow, (pa.ipc.new_stream, pa.ipc.new_file))),
        "image": file("x.png", lambda path: read_image(path, ImageForm(8, 3, np.float32)), *map(_image, IMAGE_FORMATS)),
        **{
            f"checkpoint {name}": Kind([(_checkpoint() / part).read_bytes()], partial(_restore, part), slow=True)
            for name, part in CHECKPOINT.items()
        },
    }


def _gguf() -> bytes:
    """A file that is mostly header."""
    with tempfile.TemporaryDirectory() as folder:
        writer = GGUFWriter(Path(folder) / "x.gguf", "llama")
        for key in ("block_count", "embedding_length", "feed_forward_length", "attention.head_count"):
            writer.add_uint32(f"llama.{key}", 2)
        writer.add_float32("llama.rope.freq_base", 1e4)
        writer.add_string("tokenizer.ggml.model", "gpt2")
        writer.add_array("tokenizer.ggml.tokens", ["a", "b", "ab"])
        writer.add_array("tokenizer.ggml.merges", ["a b"])
        writer.add_tensor("token_embd.weight", np.ones((3, 2), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return (Path(folder) / "x.gguf").read_bytes()


def encoded(value: Any) -> bytes:
    return json.dumps(value).encode()


def safetensors(header: bytes, values: bytes) -> bytes:
    """The bytes of a file: the length of its header, the header, the values."""
    return struct.pack("<Q", len(header)) + header + values


def _written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def _read_adapter(file: Path) -> None:
    base_directory(file.parent)
    adapter_fields(file.parent, Decoder(**fields_of(LLAMA)))


def _read_chat(encoder: ChatEncoder, line: bytes) -> object:
    with warnings.catch_warnings(action="ignore"):  # fields that the template does not read
        return encoder.document(chat_of(parse_object(line)))


def _read_lines(file: Path) -> None:
    records = open_records(JsonTexts, [file])
    try:
        for index in range(len(records)):
            records.piece(index)
    finally:
        records.close()


def _table() -> pa.Table:
    messages = CONVERSATIONS[0]["messages"]
    return pa.table(
        {"text": ["one", "two", "three" * 50], "messages": [messages, [], messages * 9], "number": [1, 2, 3]}
    )


def _parquet(compression: str) -> bytes:
    file = io.BytesIO()
    pq.write_table(_table(), file, compression=compression)
    return file.getvalue()


def _arrow(writer: Callable[..., Any]) -> bytes:
    file = io.BytesIO()
    with writer(file, _table().schema) as opened:
        opened.write_table(_table())
    return file.getvalue()


def _image(kind: str) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (9, 7), (200, 100, 50)).save(file, kind)
    return file.getvalue()


def _read_rows(file: Path) -> None:
    records = open_records(JsonRecords, [file])
    try:
        for index in range(len(records)):
            records.rows.record(index)
    finally:
        records.close()


@cache
def _checkpoint() -> Path:
    """The directory of an undamaged checkpoint, of step 1."""
    folder = tempfile.TemporaryDirectory(prefix="jaxmem-fuzz-")
    atexit.register(folder.cleanup)
    with Checkpoints(folder.name) as checkpoints:
        checkpoints.save(1, {"x": jnp.arange(8.0)}, {"step": 1}, {"name": "x"}, force=True)
    return Path(folder.name)


def _restore(part: str, data: bytes, at: Path) -> Any:
    """A copy of that checkpoint, one of its files replaced."""
    place, array = at / "checkpoints", jnp.arange(8.0)
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(_checkpoint(), place)
    (place / part).write_bytes(data)
    with Checkpoints(place, read_only=True) as checkpoints:
        return checkpoints.restore(1, {"x": jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)})
