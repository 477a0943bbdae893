"""A Hugging Face `config.json` as the fields of a decoder, and back.

Each family says what its class does by itself (which projections have biases, whether heads are normalised, what a
key means that is absent). What a decoder here cannot compute is refused, never left out: other scaling of rotary
positions, layers that differ, other activations, weights quantized by another tool.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxmem.config.networks import Decoder, Rope
from jaxmem.errors import UserError

MAX_BYTES = 16 << 20  # more than any of these files; their content is checked, not trusted


@dataclass(frozen=True)
class Family:
    """One architecture of Hugging Face's, with the defaults of its class for keys that a file may lack."""

    model_type: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    biased: bool | None = None  # of queries, keys and values: always, never; None: as `attention_bias` says
    biased_output: bool = True  # where `attention_bias` says so
    mlp_bias: bool = False  # whether the file may ask for it
    qk_norm: bool = False


_QWEN = {"sliding_window": 4096}  # where `use_sliding_window` says so

FAMILIES = {
    "LlamaForCausalLM": Family("llama", mlp_bias=True),
    "MistralForCausalLM": Family("mistral", {"num_key_value_heads": 8, "sliding_window": 4096}, biased=False),
    "Qwen2ForCausalLM": Family("qwen2", {"num_key_value_heads": 32, **_QWEN}, biased=True, biased_output=False),
    "Qwen3ForCausalLM": Family("qwen3", {"num_key_value_heads": 32, "head_dim": 128, **_QWEN}, qk_norm=True),
}
SHAPE = {
    "vocab": "vocab_size",
    "layers": "num_hidden_layers",
    "embed": "hidden_size",
    "mlp": "intermediate_size",
    "heads": "num_attention_heads",
}
SCALINGS = ("default", "linear", "llama3", "yarn")
# Settings that change what a model computes, and the only value of each that a decoder here has.
FIXED = {
    "hidden_act": "silu",
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
    "attn_logit_softcapping": None,
}


def read_json(file: Path) -> dict[str, Any]:
    try:
        if file.stat().st_size > MAX_BYTES:
            raise UserError(f"{file}: larger than {MAX_BYTES >> 20} MiB, which no such file is")
        text = file.read_bytes()
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}") from error
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file}: no valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise UserError(f"{file}: must hold an object, not {type(found).__name__}")
    return found


def decoder_fields(directory: str) -> dict[str, Any]:
    """The fields of `model` that the config.json of a directory stands for."""
    place = Path(directory).expanduser()
    if not place.is_dir():
        raise UserError(f"model.hf: {directory}: no such directory; give one with config.json and *.safetensors")
    file = place / "config.json"
    if not file.is_file():
        raise UserError(f"model.hf: {directory}: no config.json is there; give a Hugging Face model's directory")
    try:
        return fields_of(read_json(file))
    except _UnfitError as error:
        raise UserError(f"{file}: {error}") from None


class _UnfitError(Exception):
    """What a decoder here does not have."""


def fields_of(given: Mapping[str, Any]) -> dict[str, Any]:
    named = _names(given, "architectures")
    family = next((FAMILIES[name] for name in named if name in FAMILIES), None) or next(
        (one for one in FAMILIES.values() if not named and one.model_type == given.get("model_type")), None
    )
    if family is None:
        raise _UnfitError(
            f"architecture {', '.join(named) or given.get('model_type')} is not known; known: {', '.join(FAMILIES)}"
        )
    for key, only in FIXED.items():
        if given.get(key, only) != only:
            raise _UnfitError(f"{key} {json.dumps(given[key])} is not supported, only {json.dumps(only)}")
    shape = {name: _whole(given, key) for name, key in SHAPE.items()}
    known = {"num_key_value_heads": shape["heads"], **family.defaults}
    asked = bool(given.get("attention_bias", False))
    biased = asked if family.biased is None else family.biased
    return {
        **shape,
        "kv_heads": _whole(given, "num_key_value_heads", known["num_key_value_heads"]),
        "head_dim": _whole(given, "head_dim", known.get("head_dim", shape["embed"] // shape["heads"])),
        "rope": _rope(given),
        "norm_epsilon": _number(given, "rms_norm_eps", 1e-6),
        "qk_norm": family.qk_norm,
        "attention_bias": biased,
        "output_bias": biased and family.biased_output,
        "mlp_bias": family.mlp_bias and bool(given.get("mlp_bias", False)),
        "tie_embeddings": bool(given.get("tie_word_embeddings", False)),
        "window": _window(given, family, shape["layers"]),
    }


def _names(given: Mapping[str, Any], key: str) -> list[str]:
    value = given.get(key) or []
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise _UnfitError(f"{key}: must be a list of names, not {value!r}")
    return value


def _whole(given: Mapping[str, Any], key: str, default: Any = None, least: int = 1) -> int:
    value = given.get(key)
    value = default if value is None else value
    if type(value) is not int or value < least:
        raise _UnfitError(f"{key}: must be a whole number of at least {least}, not {value!r}")
    return value


def _window(given: Mapping[str, Any], family: Family, layers: int) -> int | None:
    """How many keys a query sees; every layer must see as many."""
    kinds = set(_names(given, "layer_types"))
    window = given.get("sliding_window", family.defaults.get("sliding_window"))
    if family.model_type in ("qwen2", "qwen3"):
        if not given.get("use_sliding_window", False) or window is None:
            return None
        first = _whole(given, "max_window_layers", 28, least=0)
        there = {"full_attention": first > 0, "sliding_attention": first < layers}
        kinds = kinds or {kind for kind, any_layer in there.items() if any_layer}
    elif family.model_type != "mistral" or window is None:
        return None
    kinds = kinds or {"sliding_attention"}
    if kinds == {"full_attention"}:
        return None
    if kinds != {"sliding_attention"}:
        raise _UnfitError(f"layers of {len(kinds)} kinds ({', '.join(sorted(kinds))}); all must have the same window")
    return _whole(given, "sliding_window", window)


def _rope(given: Mapping[str, Any]) -> dict[str, Any]:
    """Both spellings: `rope_theta` and `rope_scaling`, or since transformers 5 `rope_parameters`."""
    scaling = given.get("rope_parameters") or given.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        raise _UnfitError(f"rope_scaling: must be an object, not {scaling!r}")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if not isinstance(kind, str) or kind not in SCALINGS:
        raise _UnfitError(f"rope_type {kind!r} is not supported; supported: {', '.join(SCALINGS)}")
    for key, only in (("mscale", None), ("mscale_all_dim", None), ("truncate", True)):
        if scaling.get(key, only) not in (only, None):
            raise _UnfitError(f"rope_scaling.{key} {scaling[key]!r} is not supported; leave it out")
    rope: dict[str, Any] = {"theta": _number({**given, **scaling}, "rope_theta", 10_000.0)}
    if kind == "default":
        return rope
    rope |= {"scaling": kind, "factor": _number(scaling, "factor")}
    if kind == "llama3":
        rope |= {
            "low_frequency": _number(scaling, "low_freq_factor"),
            "high_frequency": _number(scaling, "high_freq_factor"),
        }
    if kind == "yarn":
        rope |= {"beta_fast": _number(scaling, "beta_fast", 32.0), "beta_slow": _number(scaling, "beta_slow", 1.0)}
        if scaling.get("attention_factor") is not None:
            rope["attention_factor"] = _number(scaling, "attention_factor")
    if kind != "linear":
        length = given.get("max_position_embeddings")
        rope["original_length"] = _whole(scaling, "original_max_position_embeddings", length)
    return rope


def _number(given: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = given.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e300:
        raise _UnfitError(f"{key}: must be a number above 0, not {value!r}")
    return float(value)


def config_json(model: Decoder, base: Mapping[str, Any] | None = None, length: int = 2048) -> dict[str, Any]:
    """The config.json of a decoder: `base` where that already says the same, or that of the first family that can.

    `base` is the file that the model came with; what has no meaning here (ids of special tokens) is kept from it.
    """
    wanted = _comparable(model)
    if base is not None and _read_back(base) == wanted:
        return dict(base)
    kept = {key: value for key, value in (base or {}).items() if key.endswith("_token_id")}
    if model.rope.scaling in ("llama3", "yarn"):
        length = max(length, round(model.rope.factor * model.rope.original_length))
    length = (base or {}).get("max_position_embeddings", length)
    for architecture in FAMILIES:
        written = _written(model, architecture, length)
        if _read_back(written) == wanted:
            return {**written, **kept}
    asked = [
        name for name in ("qk_norm", "attention_bias", "output_bias", "mlp_bias", "window") if getattr(model, name)
    ]
    raise UserError(f"model: no family of Hugging Face has {', '.join(asked)} together; known: {', '.join(FAMILIES)}")


def _comparable(model: Decoder) -> dict[str, Any]:
    return model.model_dump(exclude={"family", "preset", "hf", "dropout"})


def _read_back(written: Mapping[str, Any]) -> dict[str, Any] | None:
    try:
        return _comparable(Decoder.model_validate(fields_of(written)))
    except (_UnfitError, ValueError):
        return None


def _written(model: Decoder, architecture: str, length: int) -> dict[str, Any]:
    family = FAMILIES[architecture]
    found = {
        "architectures": [architecture],
        "model_type": family.model_type,
        **{key: getattr(model, name) for name, key in SHAPE.items()},
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_epsilon,
        "attention_bias": model.attention_bias,
        "mlp_bias": model.mlp_bias,
        "tie_word_embeddings": model.tie_embeddings,
        "max_position_embeddings": length,
        "rope_theta": model.rope.theta,
        "rope_scaling": _scaling(model.rope),
        "sliding_window": model.window,
    }
    if family.model_type in ("qwen2", "qwen3"):
        found |= {
            "use_sliding_window": model.window is not None,
            "max_window_layers": 0 if model.window else model.layers,
        }
    return found


def _scaling(rope: Rope) -> dict[str, Any] | None:
    if rope.scaling == "none":
        return None
    found: dict[str, Any] = {"rope_type": rope.scaling, "factor": rope.factor}
    if rope.scaling == "llama3":
        found |= {"low_freq_factor": rope.low_frequency, "high_freq_factor": rope.high_frequency}
    if rope.scaling == "yarn":
        found |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow}
        if rope.attention_factor is not None:
            found["attention_factor"] = rope.attention_factor
    if rope.scaling != "linear":
        found["original_max_position_embeddings"] = rope.original_length
    return found
