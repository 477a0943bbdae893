"""A Hugging Face `config.json` as the fields of a decoder, and back.

`hf_families.py` has the properties of each architecture. Files of models that `Decoder` does not support are refused:
with another scaling of rotary positions, or another kind of layer or activation.
"""

from functools import reduce
from pathlib import Path
from typing import Annotated, get_args

from pydantic import Field, ValidationError

from jaxmem.config.explain import explain
from jaxmem.config.hf_families import ACTIVATIONS, HF_ARCHITECTURES, WINDOWS, HfFamily, text_settings
from jaxmem.config.hf_quantized import quantization_fields, scheme_of
from jaxmem.config.hf_rope import ORIGINAL_LENGTH, rope_fields, scaling_json
from jaxmem.config.hf_values import Number, Quantity, Size, UnsupportedError, check_keys, read, read_json
from jaxmem.config.networks import Decoder, Latent, Rope
from jaxmem.errors import UserError, one_of
from jaxmem.typing import JsonDict, JsonView

SHAPE = {
    "vocab": "vocab_size",
    "layers": "num_hidden_layers",
    "embed": "hidden_size",
    "mlp": "intermediate_size",
    "heads": "num_attention_heads",
}
LENGTH = "max_position_embeddings"
DEFAULT_LENGTH = 2048
DTYPES = ("float32", "float16", "bfloat16")
_OPTIONS = (
    "activation", "norms", "norm_offset", "qk_norm", "query_pre_attn_scalar", "attention_soft_cap", "logit_soft_cap",
    "scale_embeddings", "attention_sinks", "attention_bias", "output_bias", "mlp_bias", "window", "layer_types",
    "sliding_rope", "latent",
)  # fmt: skip
# Settings that change the outputs of a model, and the values that `Decoder` supports.
FIXED: dict[str, tuple[object, ...]] = {
    "partial_rotary_factor": (1.0, None),
    "attention_dropout": (0.0, None),
    "dtype": (*DTYPES, None),
    "torch_dtype": (*DTYPES, None),
    "decoder_sparse_step": (1, None),
    "mlp_only_layers": ([], None),
    "router_jitter_noise": (0.0, None),
}
UNDERSTOOD = {
    *SHAPE.values(), "architectures", "model_type", "num_key_value_heads", "head_dim", "rms_norm_eps", "attention_bias",
    "mlp_bias", "tie_word_embeddings", "rope_theta", "rope_scaling", "rope_parameters", LENGTH,
    ORIGINAL_LENGTH, "layer_types", "sliding_window", "use_sliding_window", "max_window_layers", "quantization_config",
}  # fmt: skip
# Patterns of keys that do not change logits: names, ids of tokens, initialization of weights, defaults of generation.
WITHOUT_EFFECT = (
    "_*", "*version", "unsloth*", "auto_map", "name_or_path", "tokenizer_class", "bos_token*", "eos_token*",
    "pad_token*", "unk_token*", "sep_token*", "cls_token*", "mask_token*", "decoder_start_token_id", "forced_*",
    "initializer_range", "pretraining_tp", "use_cache", "gradient_checkpointing", "attn_implementation", "output_*",
    "return_dict*", "use_return_dict", "id2label", "label2id", "num_labels", "finetuning_task", "problem_type",
    "task_specific_params", "torchscript", "prefix", "max_length", "min_length", "max_new_tokens",
    "max_sequence_length", "model_max_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups",
    "num_return_sequences", "temperature", "top_k", "top_p", "typical_p", "*_penalty",
    "*no_repeat_ngram_size", "bad_words_ids", "cache_implementation",
    # transformers ignores these keys of Phi-4-mini, gpt-oss and DeepSeek-V2.
    "aux_loss_alpha", "seq_aux", "ep_size", "full_attn_mod", "interpolate_factor", "experts_per_token",
    "initial_context_length",
)  # fmt: skip


_EXPERTS = (
    "count", "top_k", "renormalize", "shared", "shared_gate", "dense_mlp", "scale", "groups", "top_groups",
)  # fmt: skip
# The fields of `model` on which a value of `comparable` depends, where it is not the field of the same name.
_FIELDS_OF = {
    "experts": tuple(f"experts.{name}" for name in (*_EXPERTS, "every", "dense_layers")),
    "latent": tuple(f"latent.{name}" for name in Latent.model_fields),
    "windows": ("window", "layer_types"),
    "ropes": tuple(f"{rope}.{name}" for rope in ("rope", "sliding_rope") for name in Rope.model_fields),
}


def decoder_fields(directory: str) -> JsonDict:
    """The fields of `model` that the config.json of a directory describes."""
    place = Path(directory).expanduser()
    if not place.is_dir():
        raise UserError(f"model.hf={directory} does not exist; use a directory with config.json and *.safetensors")
    file = place / "config.json"
    if not file.is_file():
        raise UserError(f"model.hf={directory} contains no config.json; use the directory of a Hugging Face model")
    try:
        return fields_of(read_json(file))
    except UnsupportedError as error:
        raise UserError(f"{file}: {error}") from None


def family_of(settings: JsonView) -> HfFamily:
    """The architecture that a config.json names; the text model's, if it also reads images."""
    settings = text_settings(settings)
    architectures = read(settings, "architectures", list[str], [])
    model_type = settings.get("model_type")
    families = [HF_ARCHITECTURES[name] for name in architectures if name in HF_ARCHITECTURES]
    if not architectures:
        families = [family for family in HF_ARCHITECTURES.values() if family.model_type == model_type]
    if not families:
        given = ", ".join(architectures) or model_type
        raise UnsupportedError(f"architecture {given} is not supported; expected one of {', '.join(HF_ARCHITECTURES)}")
    expected = families[0].model_type
    if model_type not in (None, expected):  # transformers decides by model_type
        given = ", ".join(architectures)
        raise UnsupportedError(
            f"model_type={model_type} does not match architectures={given}; use model_type={expected}"
        )
    return families[0]


def fields_of(settings: JsonView) -> JsonDict:
    scheme = scheme_of(settings)
    family = family_of(settings)
    settings = text_settings(settings)
    if scheme is not None and not (family.has_mxfp4 if scheme.method == "mxfp4" else not family.fused):
        raise UnsupportedError(f"quantization_config is not supported for model_type={family.model_type}")
    check_keys(settings, UNDERSTOOD | family.understood, family.not_understood(FIXED) | family.fixed, WITHOUT_EFFECT)
    # An absent key has the default of the class; null has the default of all classes.
    settings = {**family.defaults, **settings}
    shape = {name: read(settings, key, Quantity if name == "layers" else Size) for name, key in SHAPE.items()}
    biased = read(settings, "attention_bias", bool, False) if family.biased is None else family.biased
    windows = _windows(settings, family, shape["layers"])
    fields = {
        **shape,
        "kv_heads": read(settings, "num_key_value_heads", Size, shape["heads"]),
        "head_dim": read(settings, "head_dim", Size, shape["embed"] // shape["heads"]),
        "norm_epsilon": read(settings, "rms_norm_eps", Number, 1e-6),
        "attention_bias": biased,
        "output_bias": biased and family.biased_output,
        "mlp_bias": family.mlp_bias and read(settings, "mlp_bias", bool, False),
        "tie_embeddings": read(settings, "tie_word_embeddings", bool, False),
        **family.fields,
        **{name: read(settings, key, Decoder.model_fields[name].annotation) for name, key in family.keys.items()},
        **windows,
        **rope_fields(settings, family, windows),
        **family.expert_fields(settings, shape["layers"]),
        **family.latent_fields(settings, shape["heads"]),
    }
    if scheme is None:
        return fields
    try:
        model = Decoder.model_validate(fields)
    except ValidationError as error:
        raise UnsupportedError(explain(error, fields).replace("\n", "; ")) from None
    return {**fields, "quantization": quantization_fields(scheme, settings, model)}


def _windows(settings: JsonView, family: HfFamily, layers: int) -> JsonDict:
    """The fields `window` and `layer_types`, the latter as the shortest list that is repeated."""
    types = read(settings, "layer_types", list[WINDOWS], [])
    if types and len(types) != layers:
        raise UnsupportedError(f"layer_types has {len(types)} values; expected num_hidden_layers={layers}")
    is_asked = not family.asks_for_windows or read(settings, "use_sliding_window", bool, False)
    if family.sliding_theta is not None:
        read(settings, "sliding_window", Size)  # layers differ in their rotary positions even without a window
    if settings.get("sliding_window") is None or family.windows is None or not is_asked:
        return {"window": None}
    if family.windows == "all":
        if "full_attention" in types:
            raise UnsupportedError(f"layer_types: a window of {family.model_type} does not support full_attention")
        types = []
    elif not types:
        first = read(settings, "max_window_layers", Annotated[int, Field(ge=0)], 28)
        period = family.windows
        if family.sliding_theta is not None:
            period = read(settings, "sliding_window_pattern", Size, period)
        is_full = [i < first if period == "after" else (i + 1) % period == 0 for i in range(layers)]
        types = [("sliding_attention", "full_attention")[is_full_attention] for is_full_attention in is_full]
    if "sliding_attention" not in types and types:
        return {"window": None}
    period = next(n for n in range(1, layers + 1) if types[n:] == types[:-n])
    kinds = {} if "full_attention" not in types else {"layer_types": tuple(types[:period])}
    return {"window": read(settings, "sliding_window", Size), **kinds}


def config_json(model: Decoder, base: JsonView | None = None, length: int | None = None) -> JsonDict:
    """The config.json of a decoder: `base` if it is the same model, otherwise of the first family that supports it.

    `base` is the file that the model was loaded from; the ids of its special tokens are kept. `length`: the longest
    sequence of a training.
    """
    expected = comparable(model)
    base = {key: value for key, value in text_settings(base or {}).items() if key != "quantization_config"}
    if base and _read_back(base) == expected:
        if not _is_longer(length, base):
            return base
        longer = {**base, LENGTH: length}
        if _read_back(longer) == expected:  # the scaling of rotary positions may depend on this key
            return longer
    token_ids = {key: value for key, value in base.items() if key.endswith("_token_id")}
    length = _context_length(model.rope, base, length)
    architectures = base.get("architectures") or []  # the architecture of the base first
    for architecture, family in sorted(HF_ARCHITECTURES.items(), key=lambda item: item[0] not in architectures):
        written = {"architectures": [architecture], **_settings(model, family, length)}
        if _read_back(written) == expected:
            return {**written, **token_ids}
    options = {name: info.default for name, info in Decoder.model_fields.items() if name in _OPTIONS}
    used = ", ".join(f"model.{name}" for name, usual in options.items() if getattr(model, name) != usual)
    raise UserError(
        f"{used or 'model'}: no Hugging Face architecture that export supports has this combination; train "
        f"with the settings of {one_of(HF_ARCHITECTURES)}"
    )


def _is_longer(length: int | None, base: JsonView) -> bool:
    """Whether the sequences of a training are longer than the context length of the base model."""
    base_length = base.get(LENGTH)
    return length is not None and isinstance(base_length, int) and base_length < length


def _context_length(rope: Rope, base: JsonView, length: int | None) -> int:
    """`max_position_embeddings` of a model whose settings differ from those of its base."""
    base_length = base.get(LENGTH)
    limit = base_length if isinstance(base_length, int) else length or DEFAULT_LENGTH
    scaled = round(rope.factor * rope.original_length)
    if rope.scaling in ("yarn", "longrope"):
        limit = scaled
    elif rope.scaling == "llama3":
        limit = max(limit, scaled)
    return max(limit, length or 0)


def comparable(model: Decoder) -> JsonDict:
    """The fields that change the outputs of a model."""
    unequal = {"family", "preset", "hf", "quantization", "dropout", "experts"}
    unequal |= {"rope", "sliding_rope", "window", "layer_types"}
    ropes = [(rope.theta, rope.share, scaling_json(rope)) for rope in model.ropes]
    experts = model.experts and (model.experts.model_dump(include={*_EXPERTS}), model.has_experts)
    return {**model.model_dump(exclude=unequal), "experts": experts, "windows": model.windows, "ropes": ropes}


def different_field(model: Decoder, base: Decoder) -> tuple[str, object, object] | None:
    """The first field because of which two models have different outputs: its name, and its value in each of them."""
    compared = [comparable(model), comparable(base)]
    key = next((key for key, value in compared[0].items() if value != compared[1][key]), None)
    if key is None:
        return None
    for name in _FIELDS_OF.get(key, (key,)):
        value, base_value = (_value_of(decoder, name) for decoder in (model, base))
        if value != base_value:
            return f"model.{name}", value, base_value
    raise AssertionError(f"{key} depends on other fields than {_FIELDS_OF.get(key, key)}")


def _value_of(model: Decoder, name: str) -> object:
    """The value of a field with a name such as `rope.theta`; None: the section is not set."""
    section: object = model
    return reduce(lambda part, field: getattr(part, field, None), name.split("."), section)


def _read_back(settings: JsonView) -> JsonDict | None:
    try:
        return comparable(Decoder.model_validate(fields_of(settings)))
    except (UnsupportedError, ValueError):
        return None


def _settings(model: Decoder, family: HfFamily, length: int) -> JsonDict:
    scales_by_default = "rope_parameters" in family.defaults
    settings = {
        "model_type": family.model_type,
        **{key: getattr(model, name) for name, key in SHAPE.items()},
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        family.activation: ACTIVATIONS[model.activation],
        "rms_norm_eps": model.norm_epsilon,
        "attention_bias": model.attention_bias,
        "mlp_bias": model.mlp_bias,
        "tie_word_embeddings": model.tie_embeddings,
        LENGTH: length,
        "rope_theta": model.rope.theta,
        "rope_scaling": scaling_json(model.rope) or ({"rope_type": "default"} if scales_by_default else None),
        **({"partial_rotary_factor": model.rope.share} if family.has_partial_rope else {}),
        "sliding_window": model.window,
        **{key: getattr(model, name) for name, key in family.keys.items()},
        **family.expert_settings(model),
        **family.latent_settings(model),
    }
    if family.sliding_theta is not None:
        sliding = model.sliding_rope or model.rope
        settings["rope_local_base_freq"] = sliding.theta
        settings["sliding_window"] = model.window or length  # `length` if no layer has a window
        if any(model.windows) and sliding.scaling != "none":
            settings["rope_scaling"] = None
            settings["rope_parameters"] = {
                kind: {"rope_theta": rope.theta, **(scaling_json(rope) or {"rope_type": "default"})}
                for kind, rope in zip(get_args(WINDOWS), (sliding, model.rope), strict=True)
            }
    if ORIGINAL_LENGTH in family.defaults and ORIGINAL_LENGTH in (settings["rope_scaling"] or {}):
        settings[ORIGINAL_LENGTH] = model.rope.original_length
    if family.asks_for_windows:
        settings["use_sliding_window"] = any(model.windows)
    if family.windows == "after":
        settings["max_window_layers"] = model.windows.count(None)
    if model.windows_differ or isinstance(family.windows, int):
        settings["layer_types"] = [get_args(WINDOWS)[window is None] for window in model.windows]
    return settings
