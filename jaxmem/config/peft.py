"""A PEFT `adapter_config.json` as the fields of `adapter`, and back. What an adapter here is not is refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxmem.config.hugging_face import read_json
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
# Settings that change what an adapter computes, and the only values that are known here.
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
    """The fields of `adapter` that a directory stands for."""
    file = Path(directory).expanduser() / CONFIG
    if not file.is_file():
        raise UserError(f"adapter.hf: {directory}: no {CONFIG} is there; give the directory that PEFT saved")
    given = read_json(file)
    if given.get("peft_type") == "PROMPT_TUNING":
        return _prompt_fields(file, given)
    for key, known in FIXED.items():
        if given.get(key, known[0]) not in known:
            raise UserError(f"{file}: {key} {given[key]!r} is not supported, only {' or '.join(map(repr, known))}")
    names, ranks = given.get("target_modules"), given.get("rank_pattern") or {}
    rank, alpha, dropout = given.get("r", 8), given.get("lora_alpha", 8), given.get("lora_dropout", 0.0)
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise UserError(f"{file}: target_modules must be a list of names, not {names!r}")
    if not isinstance(ranks, Mapping):
        raise UserError(f"{file}: rank_pattern must be an object of names, not {ranks!r}")
    for name in (*names, *ranks):
        if name not in TARGETS:
            raise UserError(f"{file}: target_modules has no {name!r} here{nearest(str(name), TARGETS)}")
    if any(type(one) is not int or one < 1 for one in (rank, *ranks.values())):
        raise UserError(f"{file}: r and rank_pattern must be whole numbers of at least 1")
    for key, number, least in (("lora_alpha", alpha, 1e-300), ("lora_dropout", dropout, 0)):
        if isinstance(number, bool) or not isinstance(number, int | float) or not least <= number < 1e300:
            raise UserError(f"{file}: {key} must be a number{' above 0' if least else ''}, not {number!r}")
    return {
        "kind": "dora" if given.get("use_dora", False) else "lora",
        "rank": rank,
        "alpha": float(alpha),
        "rslora": bool(given.get("use_rslora", False)),
        "dropout": float(dropout),
        "targets": {TARGETS[name]: ranks.get(name, rank) for name in sorted(names)},
    }


def _prompt_fields(file: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    length, parts = given.get("num_virtual_tokens"), given.get("num_transformer_submodules", 1)
    if type(length) is not int or length < 1:
        raise UserError(f"{file}: num_virtual_tokens must be a whole number of at least 1, not {length!r}")
    if parts not in (1, None):
        raise UserError(f"{file}: num_transformer_submodules {parts!r} is not supported, only 1")
    return {"kind": "prompt", "virtual_tokens": length}


def named_base(directory: str | Path) -> tuple[str | None, Path | None]:
    """What an adapter says that it belongs to, a directory or a name of a hub; and that directory, where it is one of
    this machine."""
    named = read_json(Path(directory).expanduser() / CONFIG).get("base_model_name_or_path")
    if not isinstance(named, str):
        return None, None
    try:
        here = Path(named).expanduser()
        return named, here if here.is_dir() else None
    except (OSError, RuntimeError, ValueError):  # no name that a file system knows
        return named, None


def base_of(directory: str | Path) -> Path:
    """The model that an adapter belongs to, where that is a directory of this machine."""
    named, here = named_base(directory)
    if here is None:
        file = Path(directory).expanduser() / CONFIG
        raise UserError(f"{file}: its base {named!r} is no directory here; give that of the base, and adapter.hf")
    return here


def adapter_json(adapter: Adapter, ranks: Mapping[str, int], base: str | None) -> dict[str, Any]:
    """The adapter_config.json of adapters with these ranks, by the names of the layers."""
    if adapter.kind == "prompt":
        return {
            "peft_type": "PROMPT_TUNING",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "num_virtual_tokens": adapter.virtual_tokens,
            "num_transformer_submodules": 1,
            "inference_mode": True,
        }
    names = {ours: theirs for theirs, ours in TARGETS.items()}
    usual = adapter.rank if adapter.rank in ranks.values() else max(ranks.values())
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
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
        "inference_mode": True,
    }
