"""A PEFT `adapter_config.json` as the fields of `adapter`. What is not supported is refused.

PEFT names modules by suffixes, complete names or regexes of names; here they are resolved for the layers of the base
model.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from safetensors import SafetensorError, safe_open

from jaxmem.config.base import Fraction
from jaxmem.config.hf_modules import EXPERT, MODULES, HfModule, match_names, modules_of, select_names
from jaxmem.config.hf_values import Number, Size, TypeForm, UnsupportedError, check_keys, read, read_json
from jaxmem.config.hub import is_id, local_directory
from jaxmem.config.networks import Decoder
from jaxmem.errors import UserError, abridge, as_yaml, nearest, one_of
from jaxmem.typing import JsonDict, JsonView

CONFIG = "adapter_config.json"
ADAPTER = "adapter_model.safetensors"
KINDS = ("LORA", "PROMPT_TUNING")
COMMON = (
    "peft_type", "task_type", "base_model_name_or_path", "revision", "inference_mode", "auto_mapping", "peft_version",
)  # fmt: skip
FROM_BASE = ("pissa", "olora", "corda")  # initializations from the base weights, which they change
# Settings that change the outputs of an adapter, and the values that are supported.
FIXED: dict[str, tuple[object, ...]] = {
    "fan_in_fan_out": (False, None),
    "bias": ("none", "all", "lora_only"),
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
}
UNDERSTOOD = {
    *COMMON, "r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora", "lora_bias", "target_modules",
    "exclude_modules", "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern", "modules_to_save",
    "target_parameters",
}  # fmt: skip
# Patterns of keys that the loaded adapter does not depend on.
WITHOUT_EFFECT = ("megatron_core", "qalora_group_size", "runtime_config", "eva_config", "ensure_weight_tying")
PROMPT = {*COMMON, "num_virtual_tokens", "num_transformer_submodules"}
PROMPT_WITHOUT_EFFECT = ("token_dim", "num_attention_heads", "num_layers", "prompt_tuning_init*", "tokenizer_*")
Names = str | list[str]  # a regex, or names
SUFFIXES = [name.rpartition(".")[2] for name in MODULES.values()]


def is_adapter(directory: str | Path) -> bool:
    return (Path(directory).expanduser() / CONFIG).is_file()


def is_prompt(directory: str | Path) -> bool:
    return _read(directory)[1].get("peft_type") == "PROMPT_TUNING"


def adapter_fields(directory: str | Path, model: Decoder) -> tuple[JsonDict, list[str]]:
    """The fields of `adapter` and the patterns of `optimizer.trainable` in a directory, for a base model."""
    file, settings = _read(directory)
    try:
        kind = settings.get("peft_type", "LORA")
        if kind not in KINDS:  # the kind decides which keys are known
            raise UnsupportedError(f"peft_type={json.dumps(kind)} is not supported; expected {one_of(KINDS)}")
        return _prompt_fields(settings) if kind == "PROMPT_TUNING" else _low_rank_fields(directory, settings, model)
    except UnsupportedError as error:
        raise UserError(f"{file}: {error}") from None


def _read(directory: str | Path) -> tuple[Path, JsonDict]:
    file = Path(directory).expanduser() / CONFIG
    if not file.is_file():
        raise UserError(f"adapter.hf={directory} contains no {CONFIG}; use a directory that PEFT saved")
    return file, read_json(file)


def _prompt_fields(settings: JsonView) -> tuple[JsonDict, list[str]]:
    check_keys(settings, PROMPT, {"num_transformer_submodules": (1, None)}, PROMPT_WITHOUT_EFFECT)
    return {"kind": "prompt", "virtual_tokens": read(settings, "num_virtual_tokens", Size)}, []


def _low_rank_fields(directory: str | Path, settings: JsonView, model: Decoder) -> tuple[JsonDict, list[str]]:
    if names := [name for name in _target_parameters(settings) if not name.endswith(".weight")]:
        raise UnsupportedError(
            f"target_parameters={abridge(names)} (adapters of parameters, such as the experts of gpt-oss) is not "
            "supported; use an adapter of linear layers only"
        )
    if str(settings.get("init_lora_weights")).startswith(FROM_BASE):
        raise UnsupportedError(
            f"init_lora_weights={json.dumps(settings['init_lora_weights'])} changes the base model; save the adapter "
            "with PEFT's path_initial_model_for_weight_conversion, which makes it a LoRA of the unchanged base"
        )
    check_keys(settings, UNDERSTOOD, FIXED, WITHOUT_EFFECT)
    modules = modules_of(model)
    saved = _saved_modules(settings, modules, model)
    targets = [target for target in _targets(settings, modules) if target not in saved]
    others = [target for target in targets if not target.is_expert]
    if 0 < len(others) < len(targets) and not _has_experts(directory):
        targets = others
    if not targets:
        raise UnsupportedError('target_modules selects no layer of the model; use e.g. "all-linear"')
    rank = read(settings, "r", Size, 8)
    alpha = read(settings, "lora_alpha", Number, 8)
    ranks = dict.fromkeys(targets, rank) | _by_module(settings, "rank_pattern", Size, targets)
    alphas = _by_module(settings, "alpha_pattern", Number, targets)
    bias = settings.get("bias", "none")
    biased = {"none": [], "all": modules, "lora_only": targets}[bias]
    trained = {f"{pattern}.*": None for pattern in _by_pattern(dict.fromkeys(saved, 1), modules)}
    trained |= {f"{module.path}.bias": None for module in biased if module.has_bias}
    fields = {
        "kind": "dora" if read(settings, "use_dora", bool, False) else "lora",
        "rank": rank,
        "alpha": alpha,
        "alpha_pattern": _by_pattern(alphas, modules) or None,
        "rslora": read(settings, "use_rslora", bool, False),
        "lora_bias": read(settings, "lora_bias", bool, False),
        "dropout": read(settings, "lora_dropout", Fraction, 0.0),
        "targets": _by_pattern(ranks, modules),
    }
    return fields, list(trained)


def _has_experts(directory: str | Path) -> bool:
    """Whether the file of an adapter has tensors of experts. Since transformers 5, experts are not linear layers, and
    a name in `target_modules` selects only the linear layers with this name, such as those of shared experts."""
    file = Path(directory).expanduser() / ADAPTER
    try:
        with safe_open(file, "numpy") as opened:
            names = opened.keys()
        return any(EXPERT in name for name in names)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file}: cannot be read: {error}") from error


def _by_pattern(values: Mapping[HfModule, float], modules: Iterable[HfModule]) -> JsonDict:
    """{pattern of layers: value}: a pattern for all layers of a stack, or for each run of layers of equal value."""
    by_pattern = {}
    for path, group in groupby(modules, key=lambda module: module.path):
        runs = [(value, list(run)) for value, run in groupby(group, key=values.get)]
        for value, run in runs:
            if value is not None:
                stack, dot, module = path.partition(".")
                layers = "" if len(runs) == 1 else f"[{run[0].layer}:{(run[-1].layer or 0) + 1}]"
                by_pattern[f"{stack}{layers}{dot}{module}"] = value
    return by_pattern


def _targets(settings: JsonView, modules: Sequence[HfModule]) -> list[HfModule]:
    """The modules with adapters, selected as in PEFT."""
    possible = [module for module in modules if module.is_matrix]
    all_names = [module.name for module in possible]
    selection = read(settings, "target_modules", Names, [])
    linear = [name.removesuffix(".weight") for name in _target_parameters(settings)]
    excluded = read(settings, "exclude_modules", Names, [])
    if isinstance(selection, str) and selection.lower() == "all-linear":
        names = {module.name for module in possible if module.path not in ("embedding", "head")}
    else:
        names = select_names(selection, all_names, "target_modules")
    if isinstance(selection, list):
        suffixes = {name.rpartition(".")[2] for name in all_names}
        for name in selection:
            if not select_names([name], all_names, "target_modules"):
                raise UnsupportedError(f"target_modules: {name} is not supported{nearest(name, suffixes)}")
        layers = read(settings, "layers_to_transform", int | list[int], [])
        if layers != []:  # 0 is the first layer
            in_layers = _in_layers(settings, [layers] if isinstance(layers, int) else layers, possible)
            names = {name for name in names if name in selection or name in in_layers}
    names |= select_names(linear, all_names, "target_parameters")
    names -= select_names(excluded, all_names, "exclude_modules")
    return [module for module in possible if module.name in names]


def _target_parameters(settings: JsonView) -> list[str]:
    return read(settings, "target_parameters", list[str], [])


def _in_layers(settings: JsonView, layers: Sequence[int], modules: Sequence[HfModule]) -> set[str]:
    """The names of the modules in these layers, of the stacks that `layers_pattern` names."""
    patterns = read(settings, "layers_pattern", Names, [])
    patterns = [patterns] if isinstance(patterns, str) else patterns
    names = {module.name for module in modules if module.layer in layers}
    matches = match_names(patterns, sorted(names), "layers_pattern", r"(.*\.)?({})\.\d+\..*")
    return set.union(*matches) if patterns else names


def _saved_modules(settings: JsonView, modules: Sequence[HfModule], model: Decoder) -> list[HfModule]:
    """The modules that `modules_to_save` trains completely: modules whose name, or the name of a module that contains
    them, ends with one of the given names."""
    ends = tuple(read(settings, "modules_to_save", list[str], []))
    matching = []
    for module in modules:
        parts = module.name.split(".")
        if any(".".join(parts[:n]).endswith(ends) for n in range(1, len(parts) + 1) if ends):
            matching.append(module)
    for name in ends:
        if not any(name in module.name for module in matching):
            raise UnsupportedError(f"modules_to_save: {name} is not supported{nearest(name, SUFFIXES)}")
    if model.tie_embeddings and any(module.path == "embedding" for module in matching):
        raise UnsupportedError("modules_to_save: an embedding is not supported with tie_word_embeddings; remove it")
    return matching


def _by_module(settings: JsonView, key: str, kind: TypeForm, modules: Sequence[HfModule]) -> dict[HfModule, float]:
    """The value of each module in `rank_pattern` or `alpha_pattern`: that of the first regex that matches it."""
    patterns = read(settings, key, dict[str, kind], {})
    patterns = {pattern.removesuffix(".weight"): value for pattern, value in patterns.items()}  # `target_parameters`
    values: dict[HfModule, float] = {}
    matches = match_names(list(patterns), [module.name for module in modules], key, r"(.*\.)?({})")
    for (pattern, value), matching in zip(patterns.items(), matches, strict=True):
        if not matching:
            raise UnsupportedError(f"{key}: {pattern} matches no target module; use the names in target_modules")
        values = {module: value for module in modules if module.name in matching} | values
    return values


def base_directory(directory: str | Path) -> tuple[str | None, Path | None]:
    """The base model that an adapter names, a directory or an id, and its path if it is a directory here."""
    name = read_json(Path(directory).expanduser() / CONFIG).get("base_model_name_or_path")
    if not isinstance(name, str):
        return None, None
    try:
        path = Path(name).expanduser()
        return name, path if path.is_dir() else None
    except (OSError, RuntimeError, ValueError):  # not a possible name of a file
        return name, None


def base_of(directory: str | Path) -> Path:
    """The directory of an adapter's base model, on this machine or in the cache of the hub."""
    name, path = base_directory(directory)
    file = Path(directory).expanduser() / CONFIG
    if path is None and name is not None and is_id(name):
        revision = read_json(file).get("revision")
        if revision is not None and not re.fullmatch(r"\w[\w.-]*", str(revision)):
            raise UserError(f"{file}: revision={as_yaml(revision)} is not the name of a commit; correct it")
        return Path(local_directory(f"{name}@{revision}" if revision else name, f"{file}: base_model_name_or_path"))
    if path is None:
        raise UserError(
            f"{file}: base_model_name_or_path={name} is not a local directory; set model.hf to the base model and"
            " adapter.hf to the adapter"
        )
    return path
