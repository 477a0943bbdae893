"""A PEFT `adapter_config.json` as the fields of `adapter`, and back. What is not supported is refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxmem.config.hf_values import read_json
from jaxmem.config.sections import Adapter
from jaxmem.errors import UserError, nearest

CONFIG = "adapter_config.json"
TARGETS = {
    "q_proj": "blocks.attention.q",
    "k_proj": "blocks.attention.k",
    "v_proj": "blocks.attention.v",
    "o_proj": "blocks.attention.o",
    "gate_proj": "blocks.mlp.gate",
    "up_proj": "blocks.mlp.up",
    "down_proj": "blocks.mlp.down",
    "embed_tokens": "embedding",
    "lm_head": "head",
}
# Settings that change what an adapter computes, and the only values that are supported here, the default first.
FIXED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA", "PROMPT_TUNING"),
    "bias": ("none",),
    "fan_in_fan_out": (False,),
    "modules_to_save": (None, []),
    "layers_to_transform": (None,),
    "alpha_pattern": ({},),
    "lora_bias": (False,),
    "trainable_token_indices": (None,),
    "layer_replication": (None,),
    "megatron_config": (None,),
    "exclude_modules": (None, []),
    "target_parameters": (None, []),
    "alora_invocation_tokens": (None,),
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),  # others change the base
}


def is_adapter(directory: str | Path) -> bool:
    return (Path(directory).expanduser() / CONFIG).is_file()


def adapter_fields(directory: str) -> dict[str, Any]:
    """The fields of `adapter` that a directory describes."""
    file = Path(directory).expanduser() / CONFIG
    if not file.is_file():
        raise UserError(f"adapter.hf: {directory}: contains no {CONFIG}; give the directory that PEFT saved")
    settings = read_json(file)
    if settings.get("peft_type") == "PROMPT_TUNING":
        return _prompt_fields(file, settings)
    for key, supported in FIXED.items():
        if settings.get(key, supported[0]) not in supported:
            only = " or ".join(map(repr, supported))
            raise UserError(f"{file}: {key} {settings[key]!r} is not supported, only {only}")
    names, ranks = settings.get("target_modules"), settings.get("rank_pattern") or {}
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise UserError(f"{file}: target_modules must be a list of names, not {names!r}")
    if not isinstance(ranks, Mapping):
        raise UserError(f"{file}: rank_pattern must be an object of names, not {ranks!r}")
    for key, modules in (("target_modules", names), ("rank_pattern", ranks)):
        if unknown := [str(name) for name in modules if name not in TARGETS]:
            raise UserError(f"{file}: {key}: {unknown[0]!r} is not supported{nearest(unknown[0], TARGETS)}")
    rank = settings.get("r", 8)
    if any(type(one) is not int or one < 1 for one in (rank, *ranks.values())):
        raise UserError(f"{file}: r and rank_pattern must be integers of at least 1")
    return {
        "kind": "dora" if settings.get("use_dora", False) else "lora",
        "rank": rank,
        "alpha": _number(file, settings, "lora_alpha", 8, above=0),
        "rslora": bool(settings.get("use_rslora", False)),
        "dropout": _number(file, settings, "lora_dropout", 0.0),
        "targets": {TARGETS[name]: ranks.get(name, rank) for name in sorted(names)},
    }


def _number(file: Path, settings: Mapping[str, Any], key: str, default: float, above: float | None = None) -> float:
    value = settings.get(key, default)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value < 1e300 or value == above:
        raise UserError(f"{file}: {key} must be a number{'' if above is None else ' above 0'}, not {value!r}")
    return float(value)


def _prompt_fields(file: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    length, parts = settings.get("num_virtual_tokens"), settings.get("num_transformer_submodules", 1)
    if type(length) is not int or length < 1:
        raise UserError(f"{file}: num_virtual_tokens must be an integer of at least 1, not {length!r}")
    if parts not in (1, None):
        raise UserError(f"{file}: num_transformer_submodules {parts!r} is not supported, only 1")
    return {"kind": "prompt", "virtual_tokens": length}


def base_directory(directory: str | Path) -> tuple[str | None, Path | None]:
    """The base model that an adapter names, a directory or a name on a hub; and its path, if it is a directory of this
    machine."""
    name = read_json(Path(directory).expanduser() / CONFIG).get("base_model_name_or_path")
    if not isinstance(name, str):
        return None, None
    try:
        path = Path(name).expanduser()
        return name, path if path.is_dir() else None
    except (OSError, RuntimeError, ValueError):  # not a possible name of a file
        return name, None


def base_of(directory: str | Path) -> Path:
    """The directory of an adapter's base model, which must be on this machine."""
    name, path = base_directory(directory)
    if path is None:
        file = Path(directory).expanduser() / CONFIG
        raise UserError(f"{file}: its base {name!r} is no directory here; give the base's directory, and adapter.hf")
    return path


def adapter_json(adapter: Adapter, ranks: Mapping[str, int], base: str | None) -> dict[str, Any]:
    """The adapter_config.json of adapters with these ranks, by the names of their layers."""
    common = {"task_type": "CAUSAL_LM", "base_model_name_or_path": base, "inference_mode": True}
    if adapter.kind == "prompt":
        own = {"num_virtual_tokens": adapter.virtual_tokens, "num_transformer_submodules": 1}
        return {"peft_type": "PROMPT_TUNING", **common, **own}
    names = {layer: name for name, layer in TARGETS.items()}
    usual = adapter.rank if adapter.rank in ranks.values() else max(ranks.values())
    return {
        "peft_type": "LORA",
        **common,
        "r": usual,
        "lora_alpha": int(adapter.alpha) if adapter.alpha.is_integer() else adapter.alpha,
        "lora_dropout": adapter.dropout,
        "target_modules": [names[layer] for layer in ranks],
        "rank_pattern": {names[layer]: rank for layer, rank in ranks.items() if rank != usual},
        "use_rslora": adapter.rslora,
        "use_dora": adapter.kind == "dora",
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
    }
