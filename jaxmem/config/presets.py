"""The decoders that `model.preset` names, in their published shapes.

60m to 1b are the Llama shapes of GaLore (https://arxiv.org/abs/2403.03507); the others are the shapes of released
models. `tiny` fits the byte tokenizer; its sizes are divisible by `tensor` 2 and 4, and by `fsdp` 2, 4 and 8.
"""

from typing import Any

SHAPE = ("vocab", "layers", "embed", "mlp", "heads", "kv_heads", "head_dim")


def _decoder(*shape: int, **fields: Any) -> dict[str, Any]:
    return {**dict(zip(SHAPE, shape, strict=True)), **fields}


def _llama3_rope(factor: float) -> dict[str, Any]:
    """The rotary positions of Llama 3.1 and later: trained with 8192 positions, then low frequencies are divided by
    `factor`."""
    return {"theta": 500_000.0, "scaling": "llama3", "factor": factor, "original_length": 8192}


def _experts(count: int, top_k: int, **fields: Any) -> dict[str, Any]:
    return {"count": count, "top_k": top_k, **fields}


GALORE = {"norm_epsilon": 1e-6}
LLAMA3 = {"rope": {"theta": 500_000.0}}
GEMMA2 = {
    "norm_epsilon": 1e-6, "activation": "gelu_tanh", "norms": "both", "norm_offset": True, "scale_embeddings": True,
    "attention_soft_cap": 50.0, "logit_soft_cap": 30.0, "tie_embeddings": True, "window": 4096,
    "layer_types": ("sliding_attention", "full_attention"),
}  # fmt: skip
OLMO2 = {"rope": {"theta": 500_000.0}, "norm_epsilon": 1e-6, "norms": "post", "qk_norm": "all_heads"}
GEMMA3 = {
    **GEMMA2, "attention_soft_cap": None, "logit_soft_cap": None, "qk_norm": True, "window": 1024,
    "layer_types": (*["sliding_attention"] * 5, "full_attention"), "sliding_rope": {"theta": 10_000.0},
    "rope": {"theta": 1_000_000.0, "scaling": "linear", "factor": 8.0},
}  # fmt: skip
GEMMA3_1B = {**GEMMA3, "window": 512, "rope": {"theta": 1_000_000.0}}
GPT_OSS = {
    "norm_epsilon": 1e-5, "activation": "swiglu_clamped", "attention_sinks": True, "attention_bias": True,
    "output_bias": True, "mlp_bias": True, "window": 128, "layer_types": ("sliding_attention", "full_attention"),
    "rope": {"theta": 150_000.0, "scaling": "yarn", "factor": 32.0, "original_length": 4096, "truncate": False},
}  # fmt: skip
PHI4_MINI = {
    "theta": 10_000.0, "share": 0.75, "scaling": "longrope", "factor": 32.0, "original_length": 4096,
    "short_factors": (1.0,) * 48,
    "long_factors": (
        1.0, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817, 2.187582649, 2.446418898,
        2.735880826, 3.059592084, 3.421605075, 3.826451687, 4.279200023, 4.785517845, 5.351743533, 5.984965424,
        6.693110555, 7.485043894, 8.370679318, 9.36110372, 10.4687158, 11.70738129, 13.09260651, 14.64173252,
        16.37415215, 18.31155283, 20.47818807, 22.90118105, 25.61086418, 28.64115884, 32.03, 32.1, 32.13, 32.23, 32.6,
        32.61, 32.64, 32.66, 32.7, 32.71, 32.93, 32.97, 33.28, 33.49, 33.5, 44.16, 47.77,
    ),
}  # fmt: skip
DEEPSEEK_ROPE = {
    "scaling": "yarn", "factor": 40.0, "original_length": 4096, "mscale": 0.707, "mscale_all_dim": 0.707,
}  # fmt: skip
DEEPSEEK_V2_LITE = {
    "norm_epsilon": 1e-6, "rope": DEEPSEEK_ROPE, "latent": {"kv_rank": 512, "rope_dim": 64, "value_dim": 128},
    "experts": _experts(
        64, 6, renormalize=False, shared=2816, shared_gate=False, dense_layers=(0,), dense_mlp=10_944
    ),
}  # fmt: skip
QWEN_MOE = {"attention_bias": True, "experts": _experts(60, 4, renormalize=False, shared=5632)}
QWEN = {"rope": {"theta": 1_000_000.0}, "norm_epsilon": 1e-6}

PRESETS: dict[str, dict[str, Any]] = {
    #               vocab    layers embed   mlp    heads kv_heads head_dim
    "tiny": _decoder(264, 4, 128, 344, 8, 4, 16),
    "60m": _decoder(32_000, 8, 512, 1376, 8, 8, 64, **GALORE),
    "130m": _decoder(32_000, 12, 768, 2048, 12, 12, 64, **GALORE),
    "350m": _decoder(32_000, 24, 1024, 2736, 16, 16, 64, **GALORE),
    "1b": _decoder(32_000, 24, 2048, 5461, 32, 32, 64, **GALORE),
    "llama2-7b": _decoder(32_000, 32, 4096, 11_008, 32, 32, 128),
    "llama2-13b": _decoder(32_000, 40, 5120, 13_824, 40, 40, 128),
    "llama3-8b": _decoder(128_256, 32, 4096, 14_336, 32, 8, 128, **LLAMA3),
    "llama3.2-1b": _decoder(128_256, 16, 2048, 8192, 32, 8, 64, rope=_llama3_rope(32.0), tie_embeddings=True),
    "llama3-70b": _decoder(128_256, 80, 8192, 28_672, 64, 8, 128, **LLAMA3),
    "llama3-405b": _decoder(128_256, 126, 16_384, 53_248, 128, 8, 128, rope=_llama3_rope(8.0)),
    "gemma2-2b": _decoder(256_000, 26, 2304, 9216, 8, 4, 256, query_pre_attn_scalar=256, **GEMMA2),
    "gemma2-9b": _decoder(256_000, 42, 3584, 14_336, 16, 8, 256, query_pre_attn_scalar=256, **GEMMA2),
    "gemma2-27b": _decoder(256_000, 46, 4608, 36_864, 32, 16, 128, query_pre_attn_scalar=144, **GEMMA2),
    "gemma3-1b": _decoder(262_144, 26, 1152, 6912, 4, 1, 256, query_pre_attn_scalar=256, **GEMMA3_1B),
    "gemma3-4b": _decoder(262_208, 34, 2560, 10_240, 8, 4, 256, query_pre_attn_scalar=256, **GEMMA3),
    "gemma3-12b": _decoder(262_208, 48, 3840, 15_360, 16, 8, 256, query_pre_attn_scalar=256, **GEMMA3),
    "gemma3-27b": _decoder(262_208, 62, 5376, 21_504, 32, 16, 128, query_pre_attn_scalar=168, **GEMMA3),
    "mistral-7b": _decoder(32_000, 32, 4096, 14_336, 32, 8, 128, window=4096),
    "olmo2-7b": _decoder(100_352, 32, 4096, 11_008, 32, 32, 128, **OLMO2),
    "olmo2-13b": _decoder(100_352, 40, 5120, 13_824, 40, 40, 128, **OLMO2),
    "phi3-mini": _decoder(32_064, 32, 3072, 8192, 32, 32, 96, window=2047),
    "phi4": _decoder(100_352, 40, 5120, 17_920, 40, 10, 128, rope={"theta": 250_000.0}),
    "phi4-mini": _decoder(200_064, 32, 3072, 8192, 24, 8, 128, rope=PHI4_MINI, tie_embeddings=True),
    "qwen2.5-7b": _decoder(152_064, 28, 3584, 18_944, 28, 4, 128, attention_bias=True, **QWEN),
    "qwen3-0.6b": _decoder(151_936, 28, 1024, 3072, 16, 8, 128, qk_norm=True, tie_embeddings=True, **QWEN),
    "qwen3-1.7b": _decoder(151_936, 28, 2048, 6144, 16, 8, 128, qk_norm=True, tie_embeddings=True, **QWEN),
    "qwen3-4b": _decoder(151_936, 36, 2560, 9728, 32, 8, 128, qk_norm=True, tie_embeddings=True, **QWEN),
    "qwen3-8b": _decoder(151_936, 36, 4096, 12_288, 32, 8, 128, qk_norm=True, **QWEN),
    "qwen3-14b": _decoder(151_936, 40, 5120, 17_408, 40, 8, 128, qk_norm=True, **QWEN),
    "qwen3-32b": _decoder(151_936, 64, 5120, 25_600, 64, 8, 128, qk_norm=True, **QWEN),
    # For mixtures, mlp is the hidden width of an expert.
    "mixtral-8x7b": _decoder(32_000, 32, 4096, 14_336, 32, 8, 128, experts=_experts(8, 2), rope={"theta": 1e6}),
    "mixtral-8x22b": _decoder(32_768, 56, 6144, 16_384, 48, 8, 128, experts=_experts(8, 2), rope={"theta": 1e6}),
    "qwen1.5-moe": _decoder(151_936, 24, 2048, 1408, 16, 16, 128, **QWEN_MOE, **QWEN),
    "deepseek-v2-lite": _decoder(102_400, 27, 2048, 1408, 16, 16, 192, **DEEPSEEK_V2_LITE),
    "gpt-oss-20b": _decoder(201_088, 24, 2880, 2880, 64, 8, 64, experts=_experts(32, 4), **GPT_OSS),
    "gpt-oss-120b": _decoder(201_088, 36, 2880, 2880, 64, 8, 64, experts=_experts(128, 4), **GPT_OSS),
    "qwen3-30b-a3b": _decoder(151_936, 48, 2048, 768, 32, 4, 128, qk_norm=True, experts=_experts(128, 8), **QWEN),
    "qwen3-235b-a22b": _decoder(151_936, 94, 4096, 1536, 64, 4, 128, qk_norm=True, experts=_experts(128, 8), **QWEN),
}
