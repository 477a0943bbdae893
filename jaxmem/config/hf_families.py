"""The architectures of transformers that a decoder can be, with the properties of each class that no file states: which
projections have biases, where norms are, the defaults of absent keys."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from jaxmem.config.hf_modules import CONCATENATED, INTERLEAVED, Fused
from jaxmem.config.hf_values import Number, Quantity, Size, UnsupportedError, read
from jaxmem.config.networks import Decoder
from jaxmem.typing import JsonDict, JsonView

# Names of `model.activation` in files.
ACTIVATIONS = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh", "swiglu_clamped": "silu"}
# Keys of mixtures of experts; `router_aux_loss_coef` has an effect only with `output_router_logits`.
EXPERTS = (
    "num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob",
    "router_aux_loss_coef", "output_router_logits",
)  # fmt: skip
# Keys of DeepSeek-V2: fields of `model.latent`, and of mixtures of experts.
LATENT = {"kv_rank": "kv_lora_rank", "q_rank": "q_lora_rank", "rope_dim": "qk_rope_head_dim", "value_dim": "v_head_dim"}
DEEPSEEK = (
    *LATENT.values(), "qk_nope_head_dim", "qk_head_dim", "n_shared_experts", "first_k_dense_replace",
    "routed_scaling_factor", "n_group", "topk_group", "topk_method", "mscale", "mscale_all_dim", "n_routed_experts",
)  # fmt: skip
WINDOWS = Literal["sliding_attention", "full_attention"]


@dataclass(frozen=True)
class HfFamily:
    model_type: str
    defaults: JsonView = field(default_factory=dict)  # the values of absent keys
    fields: JsonView = field(default_factory=dict)  # fields of `model` with the same value in all its models
    keys: Mapping[str, str] = field(default_factory=dict)  # further fields of `model`, and their keys in config.json
    biased: bool | None = None  # whether queries, keys and values have biases; None: `attention_bias` decides
    biased_output: bool = True  # whether `attention_bias` includes the output projection
    mlp_bias: bool = False  # whether config.json may set biases of the MLP
    # Layers with `sliding_window`. "all": every layer; a number n: all but every n-th layer, unless the file has
    # `layer_types`; "after": those from `max_window_layers` on, unless the file has `layer_types`; None: no layer.
    windows: Literal["all", "after"] | int | None = None
    asks_for_windows: bool = False  # whether layers have no window without `use_sliding_window`
    activation: str = "hidden_act"  # the key of the activation function
    sliding_theta: float | None = None  # base of the rotary positions of layers with a window, if it differs
    # Tensors of files that contain several weights (`hf_modules`): matrices one after the other, or interleaved.
    fused: Mapping[str, Fused] = field(default_factory=dict)
    has_mxfp4: bool = False  # whether files may have experts in MXFP4
    only: Mapping[str, tuple[object, ...]] = field(default_factory=dict)  # keys of this class with one supported value
    has_partial_rope: bool = False  # whether `partial_rotary_factor` has an effect
    longrope: tuple[str, ...] = ()  # other names of `rope_type: longrope`
    experts: tuple[str, str] | None = None  # the keys of the number of experts, and of their hidden width
    shared: str | None = None  # the key of the hidden width of a shared expert
    is_latent: bool = False  # whether attention is multi-head latent attention
    renormalize: bool | None = None  # whether the weights of chosen experts sum to 1; None: `norm_topk_prob` decides

    @property
    def understood(self) -> set[str]:
        """Keys of config.json that only this architecture has."""
        of_windows = set() if self.sliding_theta is None else {"rope_local_base_freq", "sliding_window_pattern"}
        known = {*self.keys.values(), *of_windows, *(EXPERTS if self.experts else ())}
        known |= {"partial_rotary_factor"} if self.has_partial_rope else set()
        known |= {*DEEPSEEK} if self.is_latent else set()
        known |= {"decoder_sparse_step", "mlp_only_layers"} if self.has_dense_layers else set()
        return known if self.shared is None else known | {self.shared}

    def not_understood(self, fixed: Mapping[str, tuple[object, ...]]) -> dict[str, tuple[object, ...]]:
        """Keys with one supported value, except for those that this architecture supports."""
        return {key: values for key, values in fixed.items() if key not in self.understood}

    @property
    def has_dense_layers(self) -> bool:
        """Whether config.json may describe layers without experts."""
        return self.experts is not None and self.experts[1] != "intermediate_size" and not self.is_latent

    def expert_fields(self, settings: JsonView, layers: int) -> JsonDict:
        """The fields of a mixture of experts: `experts`, and the hidden width of an expert as `mlp`."""
        if self.experts is None:
            return {}
        key, width = self.experts
        # transformers 5 has a second name for the number of experts.
        count = read({"num_local_experts": settings[key], **settings}, "num_local_experts", Quantity)
        renormalize = read(settings, "norm_topk_prob", bool, False) if self.renormalize is None else self.renormalize
        experts = {"count": count, "top_k": read(settings, "num_experts_per_tok", Size), "renormalize": renormalize}
        if read(settings, "output_router_logits", bool, False):  # then transformers trains with this loss
            experts["balance_loss"] = read(settings, "router_aux_loss_coef", Number, 0.001)
        if self.shared is not None:
            experts["shared"] = read(settings, self.shared, Size)
        if self.is_latent:
            experts |= self._deepseek_experts(settings, layers, read(settings, width, Size))
        if self.has_dense_layers:
            every = read(settings, "decoder_sparse_step", Size, 1)
            dense = [n for n in read(settings, "mlp_only_layers", list[int], []) if n in range(layers)]
            has_experts = [(n + 1) % every == 0 and n not in dense for n in range(layers)]
            if not all(has_experts):
                dense_mlp = read(settings, "intermediate_size", Size)
                experts |= {"every": every, "dense_layers": dense, "dense_mlp": dense_mlp}
        return {"mlp": read(settings, width, Size), "experts": experts}

    def _deepseek_experts(self, settings: JsonView, layers: int, width: int) -> JsonDict:
        first = read(settings, "first_k_dense_replace", Annotated[int, Field(ge=0, lt=layers)], 0)
        fields: JsonDict = {
            "shared": width * read(settings, "n_shared_experts", Size),
            "shared_gate": False,
            "scale": read(settings, "routed_scaling_factor", Number, 1.0),
        }
        if first:
            fields |= {"dense_layers": list(range(first)), "dense_mlp": read(settings, "intermediate_size", Size)}
        if settings.get("topk_method") == "group_limited_greedy":
            fields |= {"groups": read(settings, "n_group", Size), "top_groups": read(settings, "topk_group", Size)}
        return fields

    def latent_fields(self, settings: JsonView, heads: int) -> JsonDict:
        """The fields of multi-head latent attention."""
        if not self.is_latent:
            return {}
        kv_heads = read(settings, "num_key_value_heads", Size, heads)
        if kv_heads != heads:
            raise UnsupportedError(f"num_key_value_heads={kv_heads} is not supported; expected {heads}, all heads")
        latent = {name: read(settings, key, Size | None if name == "q_rank" else Size) for name, key in LATENT.items()}
        return {"head_dim": read(settings, "qk_nope_head_dim", Size) + latent["rope_dim"], "latent": latent}

    def latent_settings(self, model: Decoder) -> JsonDict:
        """The inverse: the keys of config.json for latent attention."""
        latent = model.latent
        if not self.is_latent or latent is None:
            return {}
        settings = {key: getattr(latent, name) for name, key in LATENT.items()}
        return settings | {"qk_nope_head_dim": model.head_dim - latent.rope_dim, "head_dim": latent.rope_dim}

    def expert_settings(self, model: Decoder) -> JsonDict:
        """The inverse: the keys of config.json for a mixture of experts."""
        if self.experts is None or model.experts is None:
            return {}
        count, width = self.experts
        experts = model.experts
        settings: JsonDict = {count: experts.count, width: model.mlp, "num_experts_per_tok": experts.top_k}
        settings |= {} if self.shared is None else {self.shared: experts.shared}
        if self.has_dense_layers and experts.dense_mlp is not None:
            settings |= {"decoder_sparse_step": experts.every, "mlp_only_layers": list(experts.dense_layers)}
            settings["intermediate_size"] = experts.dense_mlp
        if self.is_latent:
            settings |= {
                "n_shared_experts": (experts.shared or 0) // model.mlp,
                "first_k_dense_replace": model.has_experts.index(True),
                "intermediate_size": experts.dense_mlp or model.mlp,
                "routed_scaling_factor": experts.scale,
                "n_group": experts.groups,
                "topk_group": experts.top_groups,
                "topk_method": "greedy" if experts.groups == 1 else "group_limited_greedy",
            }
        return settings if self.renormalize else settings | {"norm_topk_prob": experts.renormalize}

    @property
    def fixed(self) -> dict[str, tuple[object, ...]]:
        """Keys with a single supported value."""
        only = ACTIVATIONS[self.fields.get("activation", "silu")]
        return {self.activation: (only,), "hidden_act": (only,), **self.only}


# Architectures that also read images, and the architecture of their text model.
TEXT_MODELS = {"Gemma3ForConditionalGeneration": "Gemma3ForCausalLM"}
_TEXT_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}


def text_settings(settings: JsonView) -> JsonView:
    """The config.json of the text model, if the model also reads images; otherwise the same one."""
    names = read(settings, "architectures", list[str], [])
    architecture = next((TEXT_MODELS[name] for name in names if name in TEXT_MODELS), None)
    if architecture is None:
        return settings
    dtype = {key: settings[key] for key in ("dtype", "torch_dtype") if key in settings}  # of all parts of the model
    return {**dtype, **read(settings, "text_config", JsonDict), "architectures": [architecture]}


def text_name(name: str) -> str | None:
    """The name that a tensor of such a model has in its text model; None: it belongs to the image encoder."""
    return next((new + name.removeprefix(old) for old, new in _TEXT_PREFIXES.items() if name.startswith(old)), None)


_ASKED_WINDOWS: Any = {"windows": "after", "asks_for_windows": True}
_MISTRAL_DEFAULTS = {"num_key_value_heads": 8, "sliding_window": 4096}
_QWEN = {"num_key_value_heads": 32, "sliding_window": 4096}
_GEMMA = {"activation": "gelu_tanh", "norms": "both", "norm_offset": True, "scale_embeddings": True}
_GEMMA_KEYS = {"query_pre_attn_scalar": "query_pre_attn_scalar", "logit_soft_cap": "final_logit_softcapping"}
_GEMMA_DEFAULTS = {
    "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096, "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
}  # fmt: skip
_MIXTRAL_DEFAULTS = {
    "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_local_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
_QWEN_MOE_DEFAULTS = {
    "num_key_value_heads": 4, "sliding_window": 4096, "num_experts": 128,
    "num_experts_per_tok": 8, "moe_intermediate_size": 768,
}  # fmt: skip
_QWEN2_MOE_DEFAULTS = {
    "num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
}  # fmt: skip
_GPT_OSS_DEFAULTS = {
    "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128, "rms_norm_eps": 1e-5, "attention_bias": True,
    "num_local_experts": 128, "num_experts_per_tok": 4, "rope_theta": 150_000.0,
    "rope_parameters": {
        "rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096,
    },
}  # fmt: skip

_DEEPSEEK_DEFAULTS = {
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "n_routed_experts": 64, "n_shared_experts": 2, "moe_intermediate_size": 1407, "topk_method": "greedy",
}  # fmt: skip

HF_ARCHITECTURES = {
    "LlamaForCausalLM": HfFamily("llama", mlp_bias=True),
    "MistralForCausalLM": HfFamily("mistral", _MISTRAL_DEFAULTS, biased=False, windows="all"),
    "Qwen2ForCausalLM": HfFamily("qwen2", _QWEN, biased=True, biased_output=False, **_ASKED_WINDOWS),
    "Qwen3ForCausalLM": HfFamily("qwen3", {**_QWEN, "head_dim": 128}, {"qk_norm": True}, **_ASKED_WINDOWS),
    "Gemma2ForCausalLM": HfFamily(
        "gemma2",
        {**_GEMMA_DEFAULTS, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        _GEMMA,
        {**_GEMMA_KEYS, "attention_soft_cap": "attn_logit_softcapping"},
        windows=2,
        activation="hidden_activation",
    ),
    "Gemma3ForCausalLM": HfFamily(
        "gemma3_text",
        {**_GEMMA_DEFAULTS, "rope_theta": 1_000_000.0, "vocab_size": 262_208, "num_attention_heads": 8},
        {**_GEMMA, "qk_norm": True},
        _GEMMA_KEYS,
        windows=6,
        activation="hidden_activation",
        sliding_theta=10_000.0,
    ),
    "Phi3ForCausalLM": HfFamily(
        "phi3",
        # transformers reads this length only outside of rope_scaling, and has a default for it.
        {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
        biased=False,
        windows="all",
        fused=CONCATENATED,
        has_partial_rope=True,
        longrope=("su", "yarn"),
    ),
    "MixtralForCausalLM": HfFamily(
        "mixtral",
        _MIXTRAL_DEFAULTS,
        biased=False,
        windows="all",
        experts=("num_local_experts", "intermediate_size"),
        renormalize=True,
    ),
    "Qwen2MoeForCausalLM": HfFamily(
        "qwen2_moe",
        _QWEN2_MOE_DEFAULTS,
        biased=True,
        biased_output=False,
        only={"qkv_bias": (True, None), "use_sliding_window": (False, None)},
        experts=("num_experts", "moe_intermediate_size"),
        shared="shared_expert_intermediate_size",
    ),
    "GptOssForCausalLM": HfFamily(
        "gpt_oss",
        _GPT_OSS_DEFAULTS,
        {"attention_sinks": True, "activation": "swiglu_clamped", "mlp_bias": True},
        windows=2,
        fused=INTERLEAVED,
        has_mxfp4=True,
        only={"swiglu_alpha": (1.702, None), "swiglu_limit": (7.0, None)},
        experts=("num_local_experts", "intermediate_size"),
        renormalize=True,
    ),
    "Qwen3MoeForCausalLM": HfFamily(
        "qwen3_moe",
        _QWEN_MOE_DEFAULTS,
        {"qk_norm": True},
        windows="all",
        asks_for_windows=True,
        experts=("num_experts", "moe_intermediate_size"),
    ),
    "DeepseekV2ForCausalLM": HfFamily(
        "deepseek_v2",
        _DEEPSEEK_DEFAULTS,
        biased=False,
        only={
            "topk_method": ("greedy", "group_limited_greedy"),
            "scoring_func": ("softmax", None),
            "norm_topk_prob": (False, None),
            "moe_layer_freq": (1, None),
            "attention_bias": (False, None),
            "mlp_bias": (False, None),
        },
        experts=("n_routed_experts", "moe_intermediate_size"),
        is_latent=True,
        renormalize=False,
    ),
    "Olmo2ForCausalLM": HfFamily("olmo2", {"rms_norm_eps": 1e-5}, {"norms": "post", "qk_norm": "all_heads"}),
}
