"""Random settings of every family's config.json, and the logits of transformers: the reference of
tests/hf/test_logits_fuzz.py.

The weights follow from their names by a formula. In an environment with torch and transformers 5:

    python -m tests.hf.logits_fuzz tests/hf/data/logits_fuzz.json

Recorded with torch 2.13.0, transformers 5.24.0, on a CPU.
"""

import json
import random
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.hf.transformers_reference import LLAMA3_ROPE, ROWS, YARN, config, values

BASES = (
    "llama2", "mistral", "qwen2-half", "qwen3", "gemma2", "gemma3", "phi3", "olmo2", "mixtral", "qwen2-moe-dense",
    "qwen3-moe-every", "gpt-oss", "deepseek-v2",
)  # fmt: skip
DRAWN, RECORDED = 16, 8  # settings of each base; the first are recorded
SHOWN = 6  # logits of the last token that are recorded
LINEAR = {"rope_type": "linear", "factor": 2.0}
MSCALE = {"mscale": 0.7, "mscale_all_dim": 0.4}
LONGROPE = {
    "rope_type": "longrope", "factor": 4.0, "short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [1.0, 3.0, 5.0, 7.0],
}  # fmt: skip
ROPES = (
    None, {}, LINEAR, LLAMA3_ROPE, YARN, {**YARN, "truncate": False}, {**YARN, "attention_factor": 1.3},
    {**YARN, **MSCALE}, {**LINEAR, **MSCALE}, {**LLAMA3_ROPE, **MSCALE}, {**YARN, "mscale_all_dim": 0.4},
    {"rope_type": "default", "mscale_all_dim": 0.4, "factor": 3.0}, {**LINEAR, "rope_theta": 77.0},
    {**LONGROPE, "original_max_position_embeddings": 8}, {**LONGROPE, "original_max_position_embeddings": 32},
    {**LINEAR, "attention_factor": 1.5}, {**LINEAR, "partial_rotary_factor": 0.5},
)  # fmt: skip
KEYS: dict[str, tuple[Any, ...]] = {
    "num_key_value_heads": (1, 2, 4), "head_dim": (8, 16), "hidden_act": ("gelu", "relu"), "rms_norm_eps": (0.1,),
    "hidden_activation": ("gelu", "silu"), "tie_word_embeddings": (True, False), "attention_bias": (True, False),
    "mlp_bias": (True, False), "qkv_bias": (True, False), "use_sliding_window": (True, False), "sliding_window": (3, 9),
    "max_window_layers": (0, 1, 28), "rope_scaling": ROPES, "rope_parameters": ROPES, "rope_theta": (50.0,),
    "partial_rotary_factor": (1.0, 0.5), "max_position_embeddings": (16, 128),
    "original_max_position_embeddings": (8, 16), "attn_logit_softcapping": (None, 2.0),
    "final_logit_softcapping": (None, 1.5), "query_pre_attn_scalar": (5, 100),
    "use_bidirectional_attention": (True, False), "sliding_window_pattern": (1, 2, 3),
    "rope_local_base_freq": (5.0, 50.0), "norm_topk_prob": (True, False), "output_router_logits": (True,),
    "router_jitter_noise": (0.1,), "num_experts_per_tok": (1, 3), "decoder_sparse_step": (1, 2, 3),
    "mlp_only_layers": ([0], [1], []), "first_k_dense_replace": (0, 1, 2), "moe_layer_freq": (1, 2),
    "n_shared_experts": (1, 3), "routed_scaling_factor": (0.5, 16.0), "n_group": (1, 2, 3), "topk_group": (1, 2),
    "topk_method": ("greedy", "group_limited_greedy", "noaux_tc"), "scoring_func": ("softmax", "sigmoid"),
    "q_lora_rank": (None, 8), "v_head_dim": (4, 12, 20), "qk_nope_head_dim": (4, 10), "qk_rope_head_dim": (2, 8),
    "swiglu_alpha": (1.0,), "swiglu_limit": (2.0,), "shared_expert_intermediate_size": (12,),
    "layer_types": (["full_attention"], ["sliding_attention"], ["sliding_attention", "full_attention"]),
}  # fmt: skip


def cases() -> Iterable[tuple[str, dict[str, Any]]]:
    """The base of each config, and the settings that replace those of its base."""
    draw = random.Random(0)
    for base in BASES:
        own = config(base)
        other = [key for key in KEYS if key not in own]
        for number in range(DRAWN):
            keys = [*draw.sample(sorted(KEYS.keys() & own.keys()), 2), *draw.sample(other, draw.randint(0, 2))]
            changed = {key: draw.choice(KEYS[key]) for key in keys}
            if "layer_types" in changed:  # a repeated pattern
                count = own["num_hidden_layers"]
                changed["layer_types"] = (changed["layer_types"] * count)[:count]
            if number < RECORDED:
                yield base, changed


def logits(settings: dict[str, Any], place: Path) -> list[float] | None:
    """The first logits after a row; None: transformers has no such model."""
    import torch
    from safetensors.numpy import load_file, save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    (place / "config.json").write_text(json.dumps(settings))
    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
    try:
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(place), **options)
        model.save_pretrained(place)
        shapes = {name: x.shape for name, x in load_file(place / "model.safetensors").items()}
        tensors = {name: values(name, shape) for name, shape in shapes.items()}
        save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
        (place / "config.json").write_text(json.dumps(settings))  # not as it was saved
        model = AutoModelForCausalLM.from_pretrained(place, **options).eval()
        with torch.no_grad():
            found = model(input_ids=torch.tensor(ROWS[:1])).logits[0, -1, :SHOWN]
    except Exception as error:  # noqa: BLE001 - of any kind: nothing to compare with
        print(type(error).__name__, str(error)[:80])
        return None
    return [float(f"{x:.6g}") for x in found.tolist()]


def main(target: str) -> None:
    import tempfile

    found = []
    for base, changed in cases():
        with tempfile.TemporaryDirectory() as place:
            expected = logits({**config(base), **changed}, Path(place))
        found.append({"base": base, "changed": changed, "logits": expected})
    Path(target).write_text("[\n" + ",\n".join(map(json.dumps, found)) + "\n]\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
