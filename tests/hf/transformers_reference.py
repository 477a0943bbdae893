"""What transformers makes of tiny models of every family: the reference of tests/hf.

The weights follow from their names by a formula, so that the suite builds the same directories without torch. In an
environment with torch, transformers 5, safetensors and numpy:

    python -m tests.hf.transformers_reference record tests/hf/data
    python -m tests.hf.transformers_reference models DIR        # the directories themselves
    python -m tests.hf.transformers_reference same DIR OTHER    # transformers reads equal tensors, bitwise; same logits

Recorded with torch 2.13.0, transformers 5.24.0, on a CPU.
"""

import json
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np

VOCAB, LENGTH = 40, 12
ROWS = np.random.default_rng(7).integers(0, VOCAB, (3, LENGTH))
PADDED, CUT = 4, 7  # row 1 begins with so much padding; row 2 is two documents, the second from here on
NEW = 10  # tokens generated after row 0

BASE = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "rope_theta": 10000.0, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
LLAMA3_ROPE = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
GEMMA2 = {
    "head_dim": 16, "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 4,
    "tie_word_embeddings": True, "query_pre_attn_scalar": 12, "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 1.5, "num_hidden_layers": 3, "cache_implementation": "hybrid",
}  # fmt: skip
GEMMA3 = {
    "head_dim": 16, "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 4, "tie_word_embeddings": True,
    "query_pre_attn_scalar": 12, "num_hidden_layers": 3, "sliding_window_pattern": 2, "rope_theta": 1e6,
    "rope_local_base_freq": 100.0, "attn_logit_softcapping": None, "final_logit_softcapping": None,
}  # fmt: skip
GEMMA3_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 4.0},
    "sliding_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0},
}  # fmt: skip
QWEN = {"rope_theta": 1e6, "rms_norm_eps": 1e-6, "use_sliding_window": False, "max_window_layers": 2}
EXPERTS = {
    "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
MODEL_TYPES = {
    "Qwen3Moe": "qwen3_moe", "Qwen2Moe": "qwen2_moe", "Gemma3": "gemma3_text", "GptOss": "gpt_oss",
    "DeepseekV2": "deepseek_v2",
}  # fmt: skip
GPT_OSS = {
    "head_dim": 16, "sliding_window": 4, "num_hidden_layers": 3, "num_local_experts": 5, "num_experts_per_tok": 2,
    "attention_bias": True, "swiglu_limit": 7.0, "experts_per_token": 2, "initial_context_length": 16,
    "rope_theta": 150000.0, "rope_scaling": {**YARN, "beta_fast": 4.0, "beta_slow": 0.5, "truncate": False},
}  # fmt: skip
SHARED = {**EXPERTS, "norm_topk_prob": False, "shared_expert_intermediate_size": 20, "qkv_bias": True}
LONGROPE = {"type": "longrope", "short_factor": [1.0, 1.5, 2.0], "long_factor": [1.0, 3.0, 9.0]}
PHI4_MINI = {
    "pad_token_id": 0, "sliding_window": 262144, "partial_rotary_factor": 0.75, "tie_word_embeddings": True,
    "full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "rope_scaling": LONGROPE,
}  # fmt: skip

DEEPSEEK = {
    "num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 12, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6,
    "v_head_dim": 12, "moe_intermediate_size": 24, "n_routed_experts": 6, "n_shared_experts": 2, "topk_group": 1,
    "num_experts_per_tok": 2, "n_group": 1, "topk_method": "greedy", "routed_scaling_factor": 1.0,
    "norm_topk_prob": False, "scoring_func": "softmax", "first_k_dense_replace": 1, "moe_layer_freq": 1,
    "num_hidden_layers": 3, "aux_loss_alpha": 0.001, "seq_aux": True,
    "rope_scaling": {**YARN, "type": "yarn", "mscale": 0.9, "mscale_all_dim": 0.7, "beta_fast": 32, "beta_slow": 1},
}  # fmt: skip
DEEPSEEK_GROUPS = {
    "q_lora_rank": 16, "topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 2,
    "rope_scaling": {"rope_type": "linear", "factor": 4.0, "mscale": 0.9, "mscale_all_dim": 0.7},
    "routed_scaling_factor": 2.5, "num_experts_per_tok": 3, "first_k_dense_replace": 0, "tie_word_embeddings": True,
}  # fmt: skip

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("Llama", {"num_key_value_heads": 4}),
    "llama3": ("Llama", {"rope_theta": 500000.0}),
    "llama3.1": ("Llama", {"rope_theta": 500000.0, "rope_scaling": LLAMA3_ROPE}),
    "llama3.2": ("Llama", {"rope_theta": 500000.0, "rope_scaling": LLAMA3_ROPE, "tie_word_embeddings": True}),
    "llama-linear": ("Llama", {"rope_scaling": {"type": "linear", "factor": 2.0}, "head_dim": 16}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", {"sliding_window": 4}),
    "mistral-nemo": ("Mistral", {"sliding_window": None, "head_dim": 16}),
    "qwen2": ("Qwen2", {**QWEN, "tie_word_embeddings": True, "sliding_window": 4}),
    "qwen2-window": ("Qwen2", {**QWEN, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}),
    "qwen2.5-yarn": ("Qwen2", {**QWEN, "rope_scaling": YARN}),
    "qwen2-half": ("Qwen2", {**QWEN, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    "gemma2": ("Gemma2", GEMMA2),
    "gemma2-types": (
        "Gemma2",
        {**GEMMA2, "final_logit_softcapping": None, "layer_types": [*["full_attention"] * 2, "sliding_attention"]},
    ),
    "gemma3": ("Gemma3", {**GEMMA3, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    "gemma3-new": ("Gemma3", {**GEMMA3, "rope_parameters": GEMMA3_ROPES, "layer_types": ["sliding_attention"] * 3}),
    "phi3": (
        "Phi3",
        {"pad_token_id": 0, "sliding_window": 5, "original_max_position_embeddings": 64, "resid_pdrop": 0.0},
    ),
    "phi4": ("Phi3", {"pad_token_id": 0, "sliding_window": None, "rope_theta": 250000.0, "rope_scaling": None}),
    "phi4-mini": ("Phi3", {**PHI4_MINI, "original_max_position_embeddings": 6}),  # of two documents, one is longer
    "phi4-mini-short": ("Phi3", {**PHI4_MINI, "original_max_position_embeddings": 14}),  # the text passes it
    "olmo2": ("Olmo2", {"rope_theta": 500000.0, "rms_norm_eps": 1e-6}),
    "qwen3": ("Qwen3", {**QWEN, "head_dim": 16}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}),
    "mixtral-all": ("Mixtral", {"num_local_experts": 3, "num_experts_per_tok": 3, "intermediate_size": 20}),
    "qwen3-moe": ("Qwen3Moe", {**QWEN, "head_dim": 16, **EXPERTS}),
    "qwen3-moe-one": (
        "Qwen3Moe",
        {
            **QWEN,
            **EXPERTS,
            "num_experts": 1,
            "num_experts_per_tok": 1,
            "norm_topk_prob": False,
            "hidden_size": 36,
            "head_dim": 8,
            "tie_word_embeddings": True,
            "use_sliding_window": True,  # in all layers, whatever max_window_layers is
            "sliding_window": 4,
        },
    ),
    "qwen2-moe": ("Qwen2Moe", {**QWEN, **SHARED}),
    "qwen2-moe-one": (
        "Qwen2Moe",
        {
            **QWEN,
            **SHARED,
            "num_experts": 1,
            "num_experts_per_tok": 1,
            "tie_word_embeddings": True,
            "norm_topk_prob": True,
        },
    ),
    "qwen3-moe-every": (
        "Qwen3Moe",
        {**QWEN, "head_dim": 16, **EXPERTS, "num_hidden_layers": 5, "decoder_sparse_step": 2},
    ),
    "qwen2-moe-dense": ("Qwen2Moe", {**QWEN, **SHARED, "num_hidden_layers": 3, "mlp_only_layers": [0]}),
    "deepseek-v2": ("DeepseekV2", DEEPSEEK),
    "deepseek-v2-groups": ("DeepseekV2", {**DEEPSEEK, **DEEPSEEK_GROUPS}),
    "gpt-oss": ("GptOss", GPT_OSS),
    "gpt-oss-all": (
        "GptOss",
        {
            **GPT_OSS,
            "num_local_experts": 3,
            "num_experts_per_tok": 3,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "rope_scaling": {"rope_type": "default"},
            "tie_word_embeddings": True,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        },
    ),
    "gpt-oss-mxfp4": (
        "GptOss",
        {
            **GPT_OSS,
            "intermediate_size": 64,
            "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
        },
    ),
    "qwen3-biases": ("Qwen3", {**QWEN, "head_dim": 16, "attention_bias": True, "rope_scaling": YARN}),
}


def config(name: str) -> dict[str, Any]:
    family, own = CASES[name]
    model_type = MODEL_TYPES.get(family, family.lower())
    given = {"architectures": [f"{family}ForCausalLM"], "model_type": model_type, **BASE, **own}
    return {key: value for key, value in given.items() if key != "hidden_act" or "hidden_activation" not in own}


def shapes(given: dict[str, Any]) -> dict[str, tuple[int, ...]]:  # noqa: C901 - one branch per family
    """What a file of the architecture holds, written from the published layout."""
    embed, mlp, heads, kv = (
        given[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    )
    family = given["model_type"]
    dim = given.get("head_dim") or embed // heads
    asked = given.get("attention_bias", False)
    biased = {"q_proj", "k_proj", "v_proj"} if family in ("qwen2", "qwen2_moe") else set()
    if asked and family != "mistral":
        biased = {"q_proj", "k_proj", "v_proj", "o_proj"}
    if given.get("mlp_bias", False):
        biased |= {"gate_proj", "up_proj", "down_proj"}
    products = {
        "self_attn.q_proj": (heads * dim, embed), "self_attn.k_proj": (kv * dim, embed),
        "self_attn.v_proj": (kv * dim, embed), "self_attn.o_proj": (embed, heads * dim),
        "mlp.gate_proj": (mlp, embed), "mlp.up_proj": (mlp, embed), "mlp.down_proj": (embed, mlp),
    }  # fmt: skip
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (embed,),
        "post_attention_layernorm.weight": (embed,),
    }
    if family.startswith("gemma"):
        layer |= {f"{when}_feedforward_layernorm.weight": (embed,) for when in ("pre", "post")}
    for name, shape in products.items():
        layer[f"{name}.weight"] = shape
        if name.split(".")[1] in biased:
            layer[f"{name}.bias"] = shape[:1]
    if family == "deepseek_v2":
        layer = {name: shape for name, shape in layer.items() if "self_attn" not in name} | latent(given)
    dense = layer
    if family in ("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "deepseek_v2"):
        layer = {name: shape for name, shape in layer.items() if not name.startswith("mlp.")} | experts(given)
    if family in ("qwen3", "qwen3_moe", "gemma3_text"):
        norms = {"self_attn.q_norm.weight": (dim,), "self_attn.k_norm.weight": (dim,)}
        layer, dense = layer | norms, dense | norms
    if family == "olmo2":
        del layer["input_layernorm.weight"]
        layer |= {"self_attn.q_norm.weight": (heads * dim,), "self_attn.k_norm.weight": (kv * dim,)}
        layer["post_feedforward_layernorm.weight"] = (embed,)
    if family == "phi3":
        names = [f"self_attn.{name}_proj.weight" for name in "qkv"], ["mlp.gate_proj.weight", "mlp.up_proj.weight"]
        for fused, parts in zip(("self_attn.qkv_proj.weight", "mlp.gate_up_proj.weight"), names, strict=True):
            layer[fused] = sum(layer.pop(part)[0] for part in parts), embed
    found = {"model.embed_tokens.weight": (given["vocab_size"], embed), "model.norm.weight": (embed,)}
    for i in range(given["num_hidden_layers"]):
        is_dense = i in given.get("mlp_only_layers", []) or (i + 1) % given.get("decoder_sparse_step", 1)
        is_dense = is_dense or i < given.get("first_k_dense_replace", 0)
        found |= {f"model.layers.{i}.{name}": shape for name, shape in (dense if is_dense else layer).items()}
    return found if given["tie_word_embeddings"] else found | {"lm_head.weight": (given["vocab_size"], embed)}


def experts(given: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of a layer's router and experts, and sinks."""
    if given["model_type"] == "gpt_oss":
        return gpt_oss(given)
    embed, is_mixtral = given["hidden_size"], given["model_type"] == "mixtral"
    mlp = given["intermediate_size" if is_mixtral else "moe_intermediate_size"]
    count = next(given[key] for key in ("num_local_experts", "num_experts", "n_routed_experts") if key in given)
    place = "block_sparse_moe" if is_mixtral else "mlp"
    gate, up, down = ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")
    one = {gate: (mlp, embed), up: (mlp, embed), down: (embed, mlp)}
    found = {f"{place}.experts.{i}.{name}.weight": shape for i in range(count) for name, shape in one.items()}
    if (shared := given.get("shared_expert_intermediate_size")) is not None:
        found |= {f"mlp.shared_expert.{name}.weight": (shared, embed) for name in ("gate_proj", "up_proj")}
        found |= {"mlp.shared_expert.down_proj.weight": (embed, shared), "mlp.shared_expert_gate.weight": (1, embed)}
    if (shared := mlp * given.get("n_shared_experts", 0)) > 0:
        found |= {f"mlp.shared_experts.{name}.weight": (shared, embed) for name in ("gate_proj", "up_proj")}
        found["mlp.shared_experts.down_proj.weight"] = (embed, shared)
    return found | {f"{place}.gate.weight": (count, embed)}


def latent(given: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of multi-head latent attention."""
    embed, heads, rank, q_rank = (
        given[key] for key in ("hidden_size", "num_attention_heads", "kv_lora_rank", "q_lora_rank")
    )
    plain, rope, value = (given[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    queries: dict[str, tuple[int, ...]] = {"q_proj.weight": (heads * (plain + rope), embed)}
    if q_rank is not None:
        queries = {"q_a_proj.weight": (q_rank, embed), "q_a_layernorm.weight": (q_rank,)}
        queries["q_b_proj.weight"] = heads * (plain + rope), q_rank
    found = {
        **queries, "kv_a_proj_with_mqa.weight": (rank + rope, embed), "kv_a_layernorm.weight": (rank,),
        "kv_b_proj.weight": (heads * (plain + value), rank), "o_proj.weight": (embed, heads * value),
    }  # fmt: skip
    return {f"self_attn.{name}": shape for name, shape in found.items()}


def gpt_oss(given: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    embed, mlp, count = given["hidden_size"], given["intermediate_size"], given["num_local_experts"]
    found: dict[str, tuple[int, ...]] = {
        "self_attn.sinks": (given["num_attention_heads"],),
        "mlp.router.weight": (count, embed),
        "mlp.router.bias": (count,),
        "mlp.experts.gate_up_proj_bias": (count, 2 * mlp),
        "mlp.experts.down_proj_bias": (count, embed),
    }
    for name, inputs, outputs in (("gate_up_proj", embed, 2 * mlp), ("down_proj", mlp, embed)):
        if "quantization_config" in given:
            found[f"mlp.experts.{name}_blocks"] = (count, outputs, inputs // 32, 16)
            found[f"mlp.experts.{name}_scales"] = (count, outputs, inputs // 32)
        else:
            found[f"mlp.experts.{name}"] = (count, inputs, outputs)
    return found


def values(name: str, shape: tuple[int, ...]) -> np.ndarray:
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    if name.endswith(("_blocks", "_scales")):
        return rng.integers(*((0, 256) if name.endswith("_blocks") else (121, 125)), shape).astype(np.uint8)
    drawn = rng.standard_normal(shape).astype(np.float32)
    return 1 + drawn / 8 if name.endswith("norm.weight") else drawn / 4


def write_directory(name: str, place: Path, dtype: Any = np.float32, **changed: Any) -> None:
    """`changed`: keys of its config.json that are others."""
    from safetensors.numpy import save_file

    place.mkdir(parents=True, exist_ok=True)
    given = {**config(name), "torch_dtype": np.dtype(dtype).name, **changed}
    (place / "config.json").write_text(json.dumps(given, indent=1))
    drawn = {one: values(one, shape) for one, shape in shapes(given).items()}
    tensors = {one: x if x.dtype == np.uint8 else x.astype(dtype) for one, x in drawn.items()}
    save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})


def opened(place: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, Mxfp4Config

    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
    if "quantization_config" in json.loads((place / "config.json").read_text()):
        options["quantization_config"] = Mxfp4Config(dequantize=True)
    return AutoModelForCausalLM.from_pretrained(place, **options).float().eval()


def logits(model: Any) -> np.ndarray:
    """Of all rows; zeros where there is padding. The documents of row 2 each by itself."""
    import torch

    def run(tokens: np.ndarray, mask: np.ndarray | None = None) -> np.ndarray:
        given = {"input_ids": torch.tensor(tokens[None])}
        if mask is not None:
            given["attention_mask"] = torch.tensor(mask[None])
        with torch.no_grad():
            return model(**given).logits[0].numpy()

    mask = (np.arange(LENGTH) >= PADDED).astype(np.int64)
    padded = run(ROWS[1], mask) * mask[:, None]
    return np.stack([run(ROWS[0]), padded, np.concatenate([run(ROWS[2, :CUT]), run(ROWS[2, CUT:])])])


def greedy(model: Any) -> np.ndarray:
    import torch

    given = torch.tensor(ROWS[:1])
    made = model.generate(
        given, attention_mask=torch.ones_like(given), max_new_tokens=NEW, do_sample=False, pad_token_id=0
    )
    return made[0, LENGTH:].numpy()


def record(target: Path) -> None:
    import tempfile

    import torch
    import transformers

    found = {}
    with tempfile.TemporaryDirectory() as place:
        for name in CASES:
            write_directory(name, Path(place, name))
            model = opened(Path(place, name))
            found[f"{name}.logits"], found[f"{name}.greedy"] = logits(model), greedy(model).astype(np.int32)
            print(f"{name:14} {np.abs(found[f'{name}.logits']).mean():.4f} {found[f'{name}.greedy'].tolist()}")
    np.savez_compressed(target / "transformers.npz", **found)
    print(torch.__version__, transformers.__version__)


def same(one: Path, other: Path) -> bool:
    a, b = opened(one), opened(other)
    first, second = a.state_dict(), b.state_dict()
    equal = first.keys() == second.keys() and all((first[name] == second[name]).all() for name in first)
    off = np.abs(logits(a) - logits(b)).max()
    print(f"{one.name}: {len(first)} tensors {'the same' if equal else 'DIFFER'}, logits {off:.1e} apart")
    return bool(equal)


def main(command: str, *places: str) -> None:
    paths = [Path(place) for place in places]
    if command == "record":
        record(paths[0])
    elif command == "models":
        for name in CASES:
            write_directory(name, paths[0] / name)
    elif [place for place in sorted(paths[0].iterdir()) if not same(place, paths[1] / place.name)]:
        sys.exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
