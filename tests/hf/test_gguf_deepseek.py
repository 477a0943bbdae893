"""DeepSeek-V2 in GGUF files: the model of a Hugging Face directory, which equals that of transformers, written as
llama.cpp writes it."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFWriter, get_tensor_name_map, quantize
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from jaxmem import hf
from jaxmem.config.hub import local_directory
from jaxmem.errors import UserError
from jaxmem.hf.tensors import Tensors
from tests.hf.gguf_reference import IDS, byte_level

SHAPES = {  # widths that are multiples of the block of q8_0, where a matrix is quantized along them
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 32, "kv_lora_rank": 32,
    "qk_nope_head_dim": 32, "v_head_dim": 32,
}  # fmt: skip
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 0.7, "mscale_all_dim": 0.7}
GROUPS = {
    "n_group": 3, "topk_group": 2, "topk_method": "group_limited_greedy", "q_lora_rank": 32,
    "routed_scaling_factor": 2.5, "num_experts_per_tok": 3, "rope_scaling": None,
}  # fmt: skip
KEYS = {
    "block_count": "num_hidden_layers", "context_length": "max_position_embeddings", "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size", "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps", "rope.freq_base": "rope_theta",
    "rope.dimension_count": "qk_rope_head_dim", "attention.kv_lora_rank": "kv_lora_rank",
    "attention.q_lora_rank": "q_lora_rank", "leading_dense_block_count": "first_k_dense_replace",
    "expert_count": "n_routed_experts", "expert_used_count": "num_experts_per_tok",
    "expert_shared_count": "n_shared_experts", "expert_feed_forward_length": "moe_intermediate_size",
    "expert_weights_scale": "routed_scaling_factor",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "cache"))


def write(folder: Path, file: Path, *, is_split: bool, kind: str = "F32", changes: Mapping[str, Any] = {}) -> None:
    """A GGUF file of a directory. `is_split`: as llama.cpp writes it since 2025, with a cache of latent vectors."""
    given = json.loads((folder / "config.json").read_text())
    metadata = {name: given[key] for name, key in KEYS.items() if given[key] is not None}
    key = given["qk_nope_head_dim"] + given["qk_rope_head_dim"]
    lengths = {"key_length": key, "value_length": given["v_head_dim"]}
    heads = given["num_attention_heads"]
    if is_split:
        latent = given["kv_lora_rank"]
        lengths = {f"{name}_mla": length for name, length in lengths.items()}
        lengths |= {"key_length": latent + given["qk_rope_head_dim"], "value_length": latent}
    metadata |= {f"attention.{name}": length for name, length in lengths.items()}
    metadata["attention.head_count_kv"] = 1 if is_split else heads
    if given["topk_method"] != "greedy":
        metadata |= {"expert_group_count": given["n_group"], "expert_group_used_count": given["topk_group"]}
    if given["rope_scaling"]:
        yarn = given["rope_scaling"]
        scaling = {
            "type": "yarn", "factor": yarn["factor"], "yarn_log_multiplier": 0.1 * yarn["mscale_all_dim"],
            "original_context_length": yarn["original_max_position_embeddings"],
        }  # fmt: skip
        metadata |= {f"rope.scaling.{name}": value for name, value in scaling.items()}
    writer = GGUFWriter(file, "deepseek2")
    tokenizer = {f"tokenizer.ggml.{name}": value for name, value in byte_level("deepseek-llm").items()}
    for name, value in ({f"deepseek2.{name}": value for name, value in metadata.items()} | tokenizer | changes).items():
        match value:
            case int():
                writer.add_uint32(name, value)
            case float():
                writer.add_float32(name, value)
            case str():
                writer.add_string(name, value)
            case list():
                writer.add_array(name, value)
    for name, values in tensors_of(folder, heads, is_split=is_split).items():
        stored = GGMLQuantizationType[kind if values.ndim > 1 else "F32"]
        writer.add_tensor(name, quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tensors_of(folder: Path, heads: int, *, is_split: bool) -> dict[str, np.ndarray]:
    names = get_tensor_name_map(MODEL_ARCH.DEEPSEEK2, 3)
    stacks: dict[str, list[np.ndarray]] = {}
    given = load_file(folder / "model.safetensors")
    for name in sorted(given, key=lambda name: [int(part) for part in re.findall(r"\d+", name)]):
        stacks.setdefault(re.sub(r"(experts)\.\d+", r"\1", name), []).append(given[name])
    tensors = {}
    for name, stack in stacks.items():
        module, _, leaf = name.rpartition(".")
        values = np.stack(stack) if ".experts." in name else stack[0]
        if is_split and module.endswith("kv_b_proj"):
            plain = SHAPES["qk_nope_head_dim"]
            per_head = values.reshape(heads, -1, values.shape[-1])
            keys = per_head[:, :plain].swapaxes(1, 2)
            parts = {"k": keys, "v": per_head[:, plain:]}
            tensors |= {
                f"{names.get_name(module.replace('kv_b', f'{part}_b'))}.{leaf}": np.ascontiguousarray(matrix)
                for part, matrix in parts.items()
            }
        else:
            tensors[f"{names.get_name(module)}.{leaf}"] = values
    return tensors


@pytest.mark.exhaustive
@pytest.mark.parametrize(("is_split", "changed"), [(True, GROUPS), (False, {"rope_scaling": YARN})])
def test_logits_equal_those_of_the_directory(
    is_split: bool, changed: dict[str, Any], tmp_path: Path, compare: ModuleType
) -> None:
    compare.write_directory("deepseek-v2", tmp_path / "given", **SHAPES, **changed)
    expected = hf.load(str(tmp_path / "given"))
    write(tmp_path / "given", tmp_path / "x.gguf", is_split=is_split)
    model = hf.load(local_directory(str(tmp_path / "x.gguf"), "model.hf"))
    assert model.cfg == expected.cfg
    ids = jnp.asarray(IDS, jnp.int32)
    np.testing.assert_array_equal(model(ids), expected(ids))


def test_a_part_of_quantized_keys_and_values(tmp_path: Path, compare: ModuleType) -> None:
    compare.write_directory("deepseek-v2", tmp_path / "given", **SHAPES, rope_scaling=YARN)
    write(tmp_path / "given", tmp_path / "x.gguf", is_split=True, kind="Q8_0")
    name = "model.layers.1.self_attn.kv_b_proj.weight"
    expected = load_file(tmp_path / "given/model.safetensors")[name]
    tensors = Tensors(local_directory(str(tmp_path / "x.gguf"), "model.hf"))
    part = tensors.read(name, expected.shape, (slice(40, 200), slice(0, 24)))
    assert 0 < np.abs(part - expected[40:200, :24]).max() < 0.01


def test_the_router_of_deepseek_v3_is_refused(tmp_path: Path, compare: ModuleType) -> None:
    compare.write_directory("deepseek-v2", tmp_path / "given", **SHAPES)
    write(tmp_path / "given", tmp_path / "x.gguf", is_split=True, changes={"deepseek2.expert_gating_func": 2})
    with pytest.raises(UserError, match=r"deepseek2.expert_gating_func=2 is not supported; expected 1 \(softmax\)"):
        local_directory(str(tmp_path / "x.gguf"), "model.hf")


def test_text_is_split_as_by_deepseek(tmp_path: Path, compare: ModuleType) -> None:
    compare.write_directory("deepseek-v2", tmp_path / "given", **SHAPES)
    write(tmp_path / "given", tmp_path / "x.gguf", is_split=True)
    directory = local_directory(str(tmp_path / "x.gguf"), "model.hf")
    splitter = Tokenizer.from_file(f"{directory}/tokenizer.json").pre_tokenizer
    parts = [part.replace("Ġ", " ") for part, _ in splitter.pre_tokenize_str("I've 123 x=~y. Ω\n\n  a  ")]
    assert parts == ["I", "'", "ve", " ", "1", "2", "3", " x", "=~", "y", ".", " Î©", "Ċ", "Ċ", " ", " a", "  "]
