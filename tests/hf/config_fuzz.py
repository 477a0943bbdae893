"""Random config.json files, and what transformers makes of each: the reference of tests/hf/test_config_fuzz.py.

In an environment with torch and transformers 5:

    python -m tests.hf.config_fuzz tests/hf/data/config_fuzz.json

Recorded with torch 2.13.0, transformers 5.23.0.
"""

import json
import random
import sys
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

CASES, MORE = 200, 100
FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")
LATER = {"Gemma2": "gemma2", "Gemma3": "gemma3_text", "Olmo2": "olmo2", "Phi3": "phi3"}
SHAPE = {"vocab_size": 24, "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4}
YARN = {"rope_type": "yarn", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALINGS: tuple[Any, ...] = (
    None, {}, {"rope_type": "default"}, {"type": "linear", "factor": 2.0},
    {"rope_type": "linear", "factor": 3, "type": "x"},
    {"rope_type": "linear", "factor": 2.0, "low_freq_factor": 2.0}, LLAMA3,
    {**LLAMA3, "original_max_position_embeddings": 16}, YARN, {**YARN, "original_max_position_embeddings": 16},
    {**YARN, "beta_fast": 16, "beta_slow": 2, "attention_factor": 1.5}, {**YARN, "truncate": False},
    {**YARN, "mscale": 0.7, "mscale_all_dim": 0.4}, {"rope_type": "dynamic", "factor": 2.0}, {"rope_theta": 500.0},
    {"rope_type": "default", "rope_theta": 300.0, "factor": 2.0},
    {"rope_type": "linear", "factor": 2, "rope_theta": 70.0},
    {"rope_type": "default", "partial_rotary_factor": 0.5}, {"type": "mrope", "mrope_section": [1, 1]},
)  # fmt: skip
KEYS: dict[str, tuple[Any, ...]] = {
    "num_key_value_heads": (None, 1, 2, 4), "head_dim": (None, 4, 8, 6), "rms_norm_eps": (1e-5, 1e-6, 0.1),
    "rope_theta": (10000.0, 500, 1e6, None), "rope_scaling": SCALINGS, "rope_parameters": SCALINGS,
    "max_position_embeddings": (32, 64, 131072), "original_max_position_embeddings": (8, 16, None),
    "attention_bias": (True, False), "mlp_bias": (True, False), "tie_word_embeddings": (True, False),
    "sliding_window": (None, 3, 4096), "use_sliding_window": (True, False), "max_window_layers": (0, 1, 2, 28),
    "layer_types": (["full_attention"] * 2, ["sliding_attention"] * 2, ["sliding_attention", "full_attention"], None),
    "hidden_act": ("silu", "gelu", "relu"), "partial_rotary_factor": (1.0, 0.5), "attention_dropout": (0.0,),
    "dtype": ("float32", "bfloat16"), "torch_dtype": ("float16",), "use_cache": (True, False), "pretraining_tp": (1, 2),
    "initializer_range": (0.1,), "qk_norm": (True,), "residual_multiplier": (0.5,), "logits_scaling": (8.0,),
    "attn_logit_softcapping": (30.0,), "head_bias": (True,), "model_type": ("llama", "mistral", "qwen2", "qwen3"),
}  # fmt: skip


GEMMA_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 70.0},
    "sliding_attention": {"rope_type": "default"},
}
KEYS_LATER: dict[str, tuple[Any, ...]] = {
    **{key: values for key, values in KEYS.items() if key not in ("hidden_act", "model_type", "rope_parameters")},
    "attn_logit_softcapping": (30.0, None, 2), "final_logit_softcapping": (30.0, None), "num_hidden_layers": (1, 3, 7),
    "query_pre_attn_scalar": (4, 100), "rope_local_base_freq": (50.0, 1e4), "sliding_window_pattern": (2, 3),
    "hidden_activation": ("gelu_pytorch_tanh", "silu", "gelu"), "rope_parameters": (None, GEMMA_ROPES, {}),
    "sliding_window": (None, 3, 4096), "use_bidirectional_attention": (False, None, True), "resid_pdrop": (0.0,),
    "layer_types": (
        ["sliding_attention", "full_attention"], ["full_attention"] * 2, ["sliding_attention"] * 2,
        ["full_attention", "sliding_attention"], ["chunked_attention"] * 2, ["full_attention"],
    ),
}  # fmt: skip


def configs() -> Iterable[dict[str, Any]]:
    draw = random.Random(0)
    for _ in range(CASES):
        family = draw.choice(FAMILIES)
        chosen = draw.sample(sorted(KEYS), draw.randint(1, 7))
        own = {key: draw.choice(KEYS[key]) for key in chosen if key != "model_type" or draw.random() < 0.2}
        yield {"architectures": [f"{family}ForCausalLM"], "model_type": family.lower(), **SHAPE, **own}
    for _ in range(MORE):
        family = draw.choice(sorted(LATER))
        own = {key: draw.choice(KEYS_LATER[key]) for key in draw.sample(sorted(KEYS_LATER), draw.randint(0, 5))}
        shape = {**SHAPE, "pad_token_id": 0, "head_dim": 4}
        yield {"architectures": [f"{family}ForCausalLM"], "model_type": LATER[family], **shape, **own}


def digest(shapes: dict[str, tuple[int, ...]]) -> int:
    """Of the names and shapes of all weights."""
    return zlib.crc32(json.dumps(sorted((name, list(shape)) for name, shape in shapes.items())).encode())


def facts(settings: dict[str, Any], place: Path) -> dict[str, Any] | None:
    """What a model computes with; None: transformers makes none."""
    import transformers

    (place / "config.json").write_text(json.dumps(settings))
    try:
        config = transformers.AutoConfig.from_pretrained(place)
        model = transformers.AutoModelForCausalLM.from_config(config)
    except Exception as error:  # noqa: BLE001 - of any kind: nothing to compare with
        print(type(error).__name__, str(error)[:80])
        return None
    layers, rotary = model.model.layers, model.model.rotary_emb
    kinds = getattr(config, "layer_types", None) or [None] * len(layers)
    buffers = dict(rotary.named_buffers())
    names = sorted({f"{kind}_" if f"{kind}_inv_freq" in buffers else "" for kind in kinds})
    attention, norm = layers[0].self_attn, layers[0].post_attention_layernorm
    windows = [getattr(layer.self_attn, "sliding_window", None) for layer in layers]
    if config.model_type in ("mistral", "phi3"):  # by the mask of the model
        windows = [config.sliding_window] * len(layers)
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    weights = {name: tuple(x.shape) for name, x in model.state_dict().items()}
    return {
        "weights": digest({name: shape for name, shape in weights.items() if not (tied and name == "lm_head.weight")}),
        "frequencies": {name: [float(f"{x:.7g}") for x in buffers[f"{name}inv_freq"].tolist()] for name in names},
        "factor": [getattr(rotary, f"{name}attention_scaling") for name in names],
        "epsilon": getattr(norm, "eps", None) or norm.variance_epsilon,
        "scale": attention.scaling,
        "soft_caps": [getattr(attention, "attn_logit_softcapping", None), _cap(model)],
        "windows": windows,
        "activation": type(getattr(layers[0].mlp, "act_fn", None) or layers[0].mlp.activation_fn).__name__,
        "heads": attention.num_key_value_groups,
    }


def _cap(model: Any) -> float | None:
    """Of the logits, where the class has one."""
    return model.config.final_logit_softcapping if model.config.model_type.startswith("gemma") else None


def main(target: str) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as made:
        found = [{"config": settings, "facts": facts(settings, Path(made))} for settings in configs()]
    Path(target).write_text("[\n" + ",\n".join(map(json.dumps, found)) + "\n]\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
