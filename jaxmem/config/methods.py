"""The methods of training a model, from all parameters in float32 to QLoRA, and configs made from a model's name.

A method consists of settings that change the mathematics or the set of trainable parameters. Settings that change only
memory and time (mesh, recompute, offload, micro-batches) do not belong to a method.
"""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Unpack

from jaxmem.config.adapter import LOW_RANK, Adapter
from jaxmem.config.hf_values import read_json
from jaxmem.config.hub import is_gguf, is_id, local_directory
from jaxmem.config.load import ConfigSource, config_of, fine_tuning_rate, load_config, read_config
from jaxmem.config.optimizers import HYPERPARAMETERS, Optimizer
from jaxmem.config.presets import preset_of, refuse_preset
from jaxmem.config.sections import Config
from jaxmem.config.user import Parts, user_objects
from jaxmem.errors import UserError, nearest
from jaxmem.typing import JsonDict, JsonView

DEFAULT_STEPS = 1000  # steps of a run without `train`, in addition to its warmup
DEFAULT_SEQUENCE_LENGTH = 2048  # tokens of a sequence, if only a model is given
DEFAULT_CHATS = "chats.jsonl"  # the conversations on which a Hugging Face model is fine-tuned


@dataclass(frozen=True)
class Method:
    """A method of training. `settings`, by section, replace those of another method; the rest of a config stays."""

    summary: str
    mathematics: str  # the difference from training all parameters in float32
    settings: Mapping[str, JsonView]


_BFLOAT16 = {"parameters": "bfloat16"}
METHODS = {
    "full": Method(
        "all parameters in float32, AdamW",
        "the reference",
        {"precision": {"parameters": "float32"}, "optimizer": {"name": "adamw"}},
    ),
    "full-bf16": Method(
        "all parameters and AdamW's moments in bfloat16",
        "weights and moments keep 8 significant bits; updates are rounded stochastically",
        {"precision": _BFLOAT16, "optimizer": {"name": "adamw"}},
    ),
    "full-8bit": Method(
        "all parameters in bfloat16, AdamW's moments in 8 bits",
        "as full-bf16, with moments quantized in blocks",
        {"precision": _BFLOAT16, "optimizer": {"name": "adamw8bit"}},
    ),
    "full-int8": Method(
        "all parameters in int8, low-rank optimizer APOLLO-Mini",
        "weights are quantized; one learning rate per matrix, from a projection of rank 1, which must be tuned again",
        {
            "precision": {"parameters": "int8"},
            "optimizer": {"name": "apollo_mini", "project_embeddings": True, "clip_by": "weight"},
            "memory": {"update": "during"},
        },
    ),
    "lora": Method(
        "low-rank adapters, frozen weights in bfloat16",
        "only the adapters are trained: the update of each matrix has a low rank",
        {"precision": {"parameters": "float32"}, "adapter": {"kind": "lora", "base": "bfloat16"}},
    ),
    "qlora": Method(
        "low-rank adapters, frozen weights in 4 bits (nf4)",
        "as lora, but quantization changes the frozen weights",
        {"precision": {"parameters": "float32"}, "adapter": {"kind": "qlora"}},
    ),
}
_PRECISION = ("parameters", "block_size", "gradients", "master", "rounding", "loss_scale")
# Hyperparameters are reset to their defaults: the method's optimizer may lack those of the config's optimizer.
_ADAPTER = ("kind", "base", "experts", "embeddings", "double_quant")
_REPLACED = {"precision": _PRECISION, "optimizer": HYPERPARAMETERS, "adapter": _ADAPTER}


class RunOptions(Parts, total=False):
    """Options of `plan` and `fit` besides a config: the parts that a script passes (its model, loss, data, ...),
    `key=value` overrides, the name of a method, and sizes."""

    overrides: Sequence[str]
    method: str | None
    sequence_length: int | None
    batch: int | None


RunSource = Config | ConfigSource


def is_model(source: RunSource) -> bool:
    """Whether a source is a preset, a Hugging Face directory, a GGUF file or an id of the hub, not a config."""
    if not isinstance(source, str | os.PathLike):
        return False
    path = Path(source)
    is_preset = preset_of(str(source)) is not None and not path.exists()
    return (path / "config.json").is_file() or is_preset or is_gguf(path) or is_id(str(source))


def run_config(
    source: RunSource,
    overrides: Sequence[str] = (),
    *,
    method: str | None = None,
    sequence_length: int | None = None,
    batch: int | None = None,
    devices: int = 1,
    **parts: Unpack[Parts],
) -> Config:
    """The config of a planned run.

    Args:
        source: A config (`train` may be absent), a preset or a Hugging Face directory.
        overrides: Settings such as `batch.global_size=8`, which replace those of the source.
        method: A name in METHODS, whose settings replace those of the config.
        sequence_length: Tokens per sequence.
        batch: Sequences per update; for a model by default one per device.
        devices: The number of devices.
        **parts: What a script brings.
    """
    sizes = {"data.sequence_length": sequence_length, "batch.global_size": batch}
    overrides = [*(f"{key}={size}" for key, size in sizes.items() if size is not None), *overrides]
    if isinstance(source, Config) and not overrides and method is None and not parts:
        return source
    user = source.user if isinstance(source, Config) else None
    raw = _settings_of(source, devices)
    if method is not None:
        _apply(method, raw)
    raw = read_config(_with_sections(raw, parts), overrides)
    train = raw.setdefault("train", {})
    if isinstance(train, dict) and train.get("steps") is None and train.get("tokens") is None:
        optimizer = raw.get("optimizer")
        warmup = optimizer.get("warmup") if isinstance(optimizer, dict) else None
        train["steps"] = DEFAULT_STEPS + (warmup if isinstance(warmup, int) else 0)
    return config_of(raw, user_objects(parts) if parts else user)


def _settings_of(source: RunSource, devices: int) -> JsonDict:
    """The settings of a config, or of a new run of a model."""
    if isinstance(source, Config):
        return source.model_dump(mode="json")
    if is_model(source):
        return _new_run(str(source), devices)
    if isinstance(source, str | os.PathLike):
        path = Path(source)
        if path.is_dir():
            saved = path / "config.yaml"
            use = saved if saved.is_file() else "a YAML file or a Hugging Face directory"
            raise UserError(f"{source} is a directory without config.json; use {use}")
        if not path.suffix and not path.exists():
            problem = f"{source} is neither a YAML file, a Hugging Face model (a directory or org/name) nor a preset"
            refuse_preset(str(source), problem)
    return read_config(source)


def config_with(source: RunSource, **parts: Unpack[Parts]) -> Config:
    """The config of a run, with the parts that a script passes (its model, loss, data, ...)."""
    if not parts:
        return source if isinstance(source, Config) else load_config(source)
    raw = source.model_dump(mode="json") if isinstance(source, Config) else read_config(source)
    return config_of(_with_sections(raw, parts), user_objects(parts))


def _with_sections(raw: JsonDict, parts: Parts) -> JsonDict:
    """The settings, with `own` as the model and the loss if a script passes them."""
    model = raw.get("model")
    if parts.get("model") is not None or parts.get("network") is not None:
        raw["model"] = {"family": "own"}
    if parts.get("loss") is not None or parts.get("loss_with_keys") is not None:
        raw["objective"] = {"name": "own"}
    given = raw.get("optimizer") or {}
    if parts.get("optimizer") is not None and isinstance(given, dict):  # pydantic reports another type
        # A complete config has all keys, so those with their defaults are accepted.
        accepted = Optimizer().model_dump(mode="json") | {key: given.get(key) for key in ("trainable", "kernel")}
        if isinstance(model, dict) and model.get("hf"):
            accepted["learning_rate"] = fine_tuning_rate(given, raw.get("adapter"))
        wrong = [key for key, value in given.items() if value not in (None, accepted.get(key))]
        if wrong:
            raise UserError(f"optimizer.{wrong[0]} has no effect with the argument optimizer; remove one of them")
        raw["optimizer"] = {**given, "clip": None}
    return raw


def _new_run(model: str, devices: int) -> JsonDict:
    """A run of a preset, or one that fine-tunes a Hugging Face model."""
    preset = None if Path(model).exists() else preset_of(model)
    run: JsonDict = {
        "name": preset or re.sub(r"[^\w.-]", "-", Path(model).resolve().name).lstrip(".-") or "model",
        "model": {"preset": preset} if preset else {"hf": model},
        "data": {"sequence_length": DEFAULT_SEQUENCE_LENGTH},
        "batch": {"global_size": devices},
        "mesh": {"fsdp": -1},
        "memory": {"remat": "full"},
    }
    if preset is None:
        longest = read_json(Path(local_directory(model, "model.hf"), "config.json")).get("max_position_embeddings")
        length = min(DEFAULT_SEQUENCE_LENGTH, longest) if isinstance(longest, int) else DEFAULT_SEQUENCE_LENGTH
        run["data"] = {"source": "chat", "path": DEFAULT_CHATS, "sequence_length": length}
    return run


def check_method(name: str) -> str:
    """The name, or an error if no method has it."""
    if name not in METHODS:
        raise UserError(f"--method {name} is unknown{nearest(name, METHODS)}")
    return name


def _apply(name: str, raw: JsonDict) -> None:
    """Applies the settings of a method, in place."""
    settings = METHODS[check_method(name)].settings
    trains_adapter = "adapter" in settings
    adapter = raw.get("adapter")
    if isinstance(adapter, dict) and (not trains_adapter or adapter.get("kind") not in LOW_RANK):
        raw["adapter"] = {}
    for section, new in settings.items():
        old = raw.get(section) or {}
        if isinstance(old, dict):  # otherwise the check of the config refuses it
            remaining = {key: value for key, value in old.items() if key not in _REPLACED.get(section, ())}
            raw[section] = {**remaining, **new}


def setting_of_method(names: Iterable[str], overrides: Sequence[str]) -> str | None:
    """The first override of a setting that makes the difference between methods, which memory does not."""
    sections = [item for name in names for item in METHODS[name].settings.items() if item[0] != "memory"]
    keys = {f"{section}.{key}" for section, settings in sections for key in settings}
    keys |= {section for section, _ in sections}
    return next((override for override in overrides if override.partition("=")[0].strip() in keys), None)


def without_replaced(method: str, words: Sequence[str]) -> list[str]:
    """The words of a command without the settings that a method replaces.

    >>> without_replaced("full-8bit", ["a.yaml", "optimizer.name=adamw", "optimizer.learning_rate=1e-3"])
    ['a.yaml', 'optimizer.learning_rate=1e-3']
    """
    settings = METHODS[method].settings
    keys = {f"{section}.{key}" for section in settings for key in (*_REPLACED.get(section, ()), *settings[section])}
    if "adapter" not in settings:
        keys |= {f"adapter.{key}" for key in Adapter.model_fields}
    return [word for word in words if word.partition("=")[0] not in keys]
