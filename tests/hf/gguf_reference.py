"""Tiny GGUF files, and what transformers makes of them: the reference of tests/hf/test_gguf.py.

The files follow from their names by a formula, so that the suite builds the same files without torch. In an environment
with torch, transformers 5, gguf and numpy:

    python tests/hf/gguf_reference.py tests/hf/data/gguf.npz

Recorded with torch 2.13.0, transformers 5.24.0 and gguf 0.19.0, on a CPU.
"""

import json
import sys
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quantize

IDS = np.random.default_rng(5).integers(0, 300, (2, 12))
TEXTS = ["Hello, I've 12345 apples.", "def f(x):\n    return x**2\n\n", "ünïcode 日本 <|end|> a"]
LAST = 3  # positions whose logits are recorded
VOCAB, LENGTH, EMBED, MLP, HEADS, KV_HEADS, LAYERS = 320, 64, 64, 96, 4, 2, 2
SHARED_MLP = 5632


def byte_tokens() -> list[str]:
    """The characters of byte-level BPE for the bytes 0 to 255."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in plain else next(others)) for byte in range(256)]


def byte_level(pre: str) -> dict[str, Any]:
    merges = ["h e", "l l", "he ll", "hell o", "Ġ a", "i n", "Ċ Ċ", "Ġ Ġ"]
    tokens = [*byte_tokens(), *(merge.replace(" ", "") for merge in merges), "<|endoftext|>", "<|end|>", "<tool>"]
    return {
        "model": "gpt2", "pre": pre, "merges": merges, **padded(tokens, [1] * (len(tokens) - 3) + [3, 3, 4]),
        "bos_token_id": len(tokens) - 3, "eos_token_id": len(tokens) - 2,
    }  # fmt: skip


def padded(tokens: list[str], types: list[int]) -> dict[str, Any]:
    """The vocabulary, with unused tokens at its end."""
    missing = VOCAB - len(tokens)
    return {"tokens": tokens + [f"[PAD{n}]" for n in range(missing)], "token_type": types + [5] * missing}


def sentencepiece() -> dict[str, Any]:
    special, codes = ["<unk>", "<s>", "</s>"], [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = ["▁", *"Helo,Iv12345aps.dfrtunx", "ll", "He", "Hell", "Hello", "▁Hello", "▁I", "▁a", "re", "▁re", "ap"]
    tokens = [*special, *codes, *dict.fromkeys(pieces)]
    types = [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259)
    return {
        "model": "llama", **padded(tokens, types),
        "scores": [0.0] * 259 + [-float(n) for n in range(VOCAB - 259)],
        "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, "padding_token_id": 2, "add_space_prefix": True,
    }  # fmt: skip


# For each case: architecture, type of its matrices, further settings, and tokenizer. Where transformers ignores a
# setting (the width of experts, some dimensions of heads), the case has the default of transformers.
CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", "F32", {}, byte_level("smollm")),
    "llama-q4_1": ("llama", "Q4_1", {}, {**byte_level("llama-bpe"), "add_bos_token": False}),
    "llama-spm": ("llama", "BF16", {}, sentencepiece()),
    "qwen2": ("qwen2", "Q8_0", {}, byte_level("qwen2")),
    "qwen3": ("qwen3", "Q5_1", {"attention.key_length": 128, "attention.head_count": 2}, byte_level("qwen2")),
    "qwen3moe": (
        "qwen3moe", "F16",
        {"attention.key_length": 16, "expert_count": 3, "expert_used_count": 2, "expert_feed_forward_length": 768},
        byte_level("qwen2"),
    ),
    "qwen2moe": (
        "qwen2moe", "F32",
        {
            "expert_count": 3, "expert_used_count": 2, "expert_feed_forward_length": 1408,
            "expert_shared_feed_forward_length": SHARED_MLP,
        },
        byte_level("qwen2"),
    ),
    "gemma2": (
        "gemma2", "F32",
        {
            "attention.key_length": 256, "attention.head_count": 1, "attention.head_count_kv": 1,
            "attention.sliding_window": 4, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
        },
        {**sentencepiece(), "add_space_prefix": False},
    ),
    "gemma3": (
        "gemma3", "Q8_0",
        {
            "attention.key_length": 256, "attention.head_count": 1, "attention.head_count_kv": 1,
            "attention.sliding_window": 4, "block_count": 7, "rope.freq_base": 1e6,
        },
        {**sentencepiece(), "add_space_prefix": False},
    ),
    "phi3": ("phi3", "F32", {"attention.sliding_window": 0}, sentencepiece()),
}  # fmt: skip
# Not read by transformers: mixtures of experts in `llama`, gpt-oss (its experts), scaled rotary positions.
OTHER_CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "mixtral": ("llama", "F32", {"expert_count": 3, "expert_used_count": 2}, sentencepiece()),
    "gpt-oss": (
        "gpt-oss", "MXFP4",
        {
            "attention.key_length": 16, "expert_count": 3, "expert_used_count": 2, "expert_feed_forward_length": 32,
            "attention.sliding_window": 4, "rope.scaling.type": "yarn", "rope.scaling.factor": 32.0,
            "rope.scaling.original_context_length": 16,
        },
        byte_level("gpt-4o"),
    ),
    "olmo2": ("olmo2", "F32", {}, byte_level("dbrx")),
}  # fmt: skip
NORMS = {  # those of a layer, where they are not attn_norm and ffn_norm
    **dict.fromkeys(("gemma2", "gemma3"), ("attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm")),
    "olmo2": ("post_attention_norm", "post_ffw_norm"),
    "gpt-oss": ("attn_norm", "post_attention_norm"),
}


def settings_of(name: str) -> tuple[str, dict[str, Any]]:
    architecture, _, own, tokenizer = (CASES | OTHER_CASES)[name]
    settings = {
        "block_count": LAYERS, "context_length": LENGTH, "embedding_length": EMBED, "feed_forward_length": MLP,
        "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS, "rope.freq_base": 10000.0,
        "attention.layer_norm_rms_epsilon": 1e-5, **own,
    }  # fmt: skip
    if "attention.key_length" not in own:
        settings["rope.dimension_count"] = EMBED // HEADS
    return architecture, {
        **{f"{architecture}.{key}": value for key, value in settings.items()},
        **{f"tokenizer.ggml.{key}": value for key, value in tokenizer.items()},
        "tokenizer.chat_template": "{% for m in messages %}{{ m['content'] }}<|end|>{% endfor %}",
    }


def tensors_of(name: str) -> dict[str, np.ndarray]:
    """The values before quantization; a tensor's values follow from its name."""
    architecture, settings = settings_of(name)
    own = {key.removeprefix(f"{architecture}."): value for key, value in settings.items()}
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB, EMBED), "output_norm.weight": (EMBED,)}
    if not architecture.startswith("gemma") and name != "llama":
        shapes["output.weight"] = (VOCAB, EMBED)
    block = {f"{norm}.weight": (EMBED,) for norm in NORMS.get(architecture, ("attn_norm", "ffn_norm"))}
    block |= _attention(architecture, own) | _mlp(architecture, own)
    for layer in range(own["block_count"]):
        shapes |= {f"blk.{layer}.{key}": shape for key, shape in block.items()}
    return {key: _values(key, shape) for key, shape in shapes.items()}


def _attention(architecture: str, own: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    heads, head_dim = own["attention.head_count"], own.get("attention.key_length", EMBED // HEADS)
    q, kv = heads * head_dim, own["attention.head_count_kv"] * head_dim
    sizes = {"q": q, "k": kv, "v": kv}
    shapes: dict[str, tuple[int, ...]] = {"attn_output.weight": (EMBED, q)}
    if architecture == "phi3":
        shapes["attn_qkv.weight"] = (q + 2 * kv, EMBED)
    else:
        shapes |= {f"attn_{part}.weight": (size, EMBED) for part, size in sizes.items()}
    if architecture in ("qwen2", "qwen2moe", "gpt-oss"):
        shapes |= {f"attn_{part}.bias": (size,) for part, size in sizes.items()}
    if architecture in ("qwen3", "qwen3moe", "gemma3"):
        shapes |= {"attn_q_norm.weight": (head_dim,), "attn_k_norm.weight": (head_dim,)}
    if architecture == "olmo2":
        shapes |= {"attn_q_norm.weight": (q,), "attn_k_norm.weight": (kv,)}
    if architecture == "gpt-oss":
        shapes |= {"attn_sinks.weight": (heads,), "attn_output.bias": (EMBED,)}
    return shapes


def _mlp(architecture: str, own: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    experts, width = own.get("expert_count"), own.get("expert_feed_forward_length", MLP)
    if architecture == "phi3":
        return {"ffn_up.weight": (2 * MLP, EMBED), "ffn_down.weight": (EMBED, MLP)}
    parts = {"gate": (width, EMBED), "up": (width, EMBED), "down": (EMBED, width)}
    if not experts:
        return {f"ffn_{part}.weight": shape for part, shape in parts.items()}
    shapes: dict[str, tuple[int, ...]] = {"ffn_gate_inp.weight": (experts, EMBED)}
    shapes |= {f"ffn_{part}_exps.weight": (experts, *shape) for part, shape in parts.items()}
    if architecture == "qwen2moe":
        shared = {"gate": (SHARED_MLP, EMBED), "up": (SHARED_MLP, EMBED), "down": (EMBED, SHARED_MLP)}
        shapes |= {f"ffn_{part}_shexp.weight": shape for part, shape in shared.items()}
        shapes["ffn_gate_inp_shexp.weight"] = (EMBED,)
    if architecture == "gpt-oss":
        shapes |= {f"ffn_{part}_exps.bias": (experts, shape[0]) for part, shape in parts.items()}
        shapes["ffn_gate_inp.bias"] = (experts,)
    return shapes


def _values(name: str, shape: tuple[int, ...]) -> np.ndarray:
    values = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape, np.float32)
    return 1 + values / 8 if name.endswith("norm.weight") else values * np.float32(0.7 / shape[-1] ** 0.5)


def write_file(name: str, file: Path, changes: Mapping[str, Any] = {}, tensors: Mapping[str, np.ndarray] = {}) -> None:
    """Writes the file of a case. `changes`: other settings; None leaves one out. `tensors`: further tensors."""
    architecture, settings = settings_of(name)
    writer = GGUFWriter(file, architecture)
    for key, value in {**settings, **changes}.items():
        match value:
            case None:
                pass
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case _:
                writer.add_array(key, value)
    kind = (CASES | OTHER_CASES)[name][1]
    for key, values in {**tensors_of(name), **tensors}.items():
        is_matrix = values.ndim > (2 if kind == "MXFP4" else 1) and not key.startswith("blk.0.ffn_gate_inp")
        stored = GGMLQuantizationType[kind if is_matrix and key.endswith("weight") else "F32"]
        writer.add_tensor(key, quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main(target: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    record: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in CASES:
            write_file(name, Path(folder) / f"{name}.gguf")
            model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=f"{name}.gguf", dtype=torch.float32).eval()
            with torch.no_grad():
                record[f"{name}.logits"] = model(torch.from_numpy(IDS)).logits[:, -LAST:].numpy()
            tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=f"{name}.gguf")
            record[f"{name}.ids"] = json.dumps([tokenizer(text)["input_ids"] for text in TEXTS])
            print(name, record[f"{name}.logits"].std(), record[f"{name}.ids"])
    np.savez_compressed(target, **record)


if __name__ == "__main__":
    main(*sys.argv[1:])
