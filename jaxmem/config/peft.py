"""A PEFT `adapter_config.json` as the fields of `adapter`, and back. What is not supported is refused.

PEFT names modules by suffixes, complete names or regexes of names; here they are resolved for the layers of the base
model, and written as patterns of layers, each with its rank.
"""

import json
import math
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from jaxmem.config.hf_modules import MODULES, HfModule, modules_of
from jaxmem.config.hf_values import UnsupportedError, boolean, check_keys, integer, names, number, read_json
from jaxmem.config.networks import Decoder
from jaxmem.config.sections import Adapter
from jaxmem.config.targets import LowRank
from jaxmem.errors import UserError, nearest

CONFIG = "adapter_config.json"
COMMON = (
    "peft_type",
    "task_type",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "auto_mapping",
    "peft_version",
)
FROM_BASE = ("pissa", "olora")  # initialized from the base weights; they are read as adapters of twice the rank
# Settings that change the outputs of an adapter, and the values that are supported.
FIXED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA", "PROMPT_TUNING"),
    "fan_in_fan_out": (False, None),
    "bias": ("none", "all", "lora_only"),
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva", *FROM_BASE),  # others change the base
}
UNDERSTOOD = {
    *COMMON, "r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora", "lora_bias", "target_modules",
    "exclude_modules", "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern", "modules_to_save",
    "trainable_token_indices",
}  # fmt: skip
# Patterns of keys that the loaded adapter does not depend on.
WITHOUT_EFFECT = ("megatron_core", "qalora_group_size", "runtime_config", "eva_config", "ensure_weight_tying")
PROMPT = {*COMMON, "num_virtual_tokens", "num_transformer_submodules"}
PROMPT_WITHOUT_EFFECT = ("token_dim", "num_attention_heads", "num_layers", "prompt_tuning_init*", "tokenizer_*")
SUFFIXES = [name.rpartition(".")[2] for name in MODULES.values()]
REGEX_SECONDS = 5
MATCH = """import json, re, sys
patterns, names = json.load(sys.stdin)
print(json.dumps([[bool(re.fullmatch(p, n)) for n in names] for p in patterns]))"""


def is_adapter(directory: str | Path) -> bool:
    return (Path(directory).expanduser() / CONFIG).is_file()


def is_prompt(directory: str | Path) -> bool:
    return _read(directory)[1].get("peft_type") == "PROMPT_TUNING"


def initialization(directory: str | Path) -> str | None:
    """One of `FROM_BASE`, or None."""
    method = _read(directory)[1].get("init_lora_weights")
    return method if method in FROM_BASE else None


def adapter_fields(directory: str | Path, model: Decoder) -> tuple[dict[str, Any], list[str]]:
    """The fields of `adapter` and the patterns of `optimizer.trainable` that a directory describes, for a base
    model."""
    file, settings = _read(directory)
    try:
        return _prompt_fields(settings) if is_prompt(directory) else _low_rank_fields(settings, model)
    except UnsupportedError as error:
        raise UserError(f"{file}: {error}") from None


def _read(directory: str | Path) -> tuple[Path, dict[str, Any]]:
    file = Path(directory).expanduser() / CONFIG
    if not file.is_file():
        raise UserError(f"adapter.hf: {directory}: contains no {CONFIG}; use a directory that PEFT saved")
    settings = read_json(file)
    if str(settings.get("init_lora_weights")).startswith("pissa_niter_"):  # the same, by fewer iterations
        settings["init_lora_weights"] = "pissa"
    return file, settings


def _prompt_fields(settings: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    check_keys(settings, PROMPT, {"num_transformer_submodules": (1, None)}, PROMPT_WITHOUT_EFFECT)
    return {"kind": "prompt", "virtual_tokens": integer(settings, "num_virtual_tokens")}, []


def _low_rank_fields(settings: Mapping[str, Any], model: Decoder) -> tuple[dict[str, Any], list[str]]:
    check_keys(settings, UNDERSTOOD, FIXED, WITHOUT_EFFECT)
    modules = modules_of(model)
    saved = _saved_modules(settings, modules, model)
    targets = [one for one in _targets(settings, modules) if one not in saved]
    if not targets:
        raise UnsupportedError(f"target_modules {settings.get('target_modules')!r}: selects no layer of the model")
    rank, alpha = integer(settings, "r", 8), number(settings, "lora_alpha", 8)
    ranks, alphas = (_by_module(settings, key, targets) for key in ("rank_pattern", "alpha_pattern"))
    factor = 2 if settings.get("init_lora_weights") in FROM_BASE else 1
    # The same scale, of twice the rank.
    alpha_factor = math.sqrt(factor) if boolean(settings, "use_rslora") else factor
    own_alphas = {one: alpha_factor * number(alphas, one.name) for one in targets if one.name in alphas}
    bias = settings.get("bias", "none")
    biased = {"none": [], "all": modules, "lora_only": targets}[bias]
    trained = {f"{pattern}.*": None for pattern in _by_pattern(dict.fromkeys(saved, 1), modules)}
    trained |= {f"{one.path}.bias": None for one in biased if one.has_bias}
    fields = {
        "kind": "dora" if boolean(settings, "use_dora") else "lora",
        "rank": factor * rank,
        "alpha": alpha_factor * alpha,
        "alpha_pattern": _by_pattern(own_alphas, modules) or None,
        "rslora": boolean(settings, "use_rslora"),
        "lora_bias": boolean(settings, "lora_bias"),
        "token_indices": _token_indices(settings),
        "dropout": number(settings, "lora_dropout", 0.0, zero=True),
        "targets": _by_pattern({one: factor * integer(ranks, one.name, rank) for one in targets}, modules),
    }
    return fields, list(trained)


def _by_pattern(values: Mapping[HfModule, Any], modules: Iterable[HfModule]) -> dict[str, Any]:
    """{pattern of layers: value}, with one pattern for all layers of a stack or for each run of layers of equal
    value."""
    found = {}
    for path, group in groupby(modules, key=lambda one: one.path):
        stack = [values.get(one) for one in group]
        runs = [(value, len(list(run))) for value, run in groupby(stack)]
        first = 0
        for value, count in runs:
            if value is not None:
                first_part, *rest = path.split(".")
                some = "" if len(runs) == 1 else f"[{first}:{first + count}]"
                found[".".join([first_part + some, *rest])] = value
            first += count
    return found


def _targets(settings: Mapping[str, Any], modules: Sequence[HfModule]) -> list[HfModule]:
    """The modules with adapters, selected like in PEFT."""
    possible = [one for one in modules if one.is_matrix]
    all_names = [one.name for one in possible]
    wanted, some = settings.get("target_modules"), settings.get("layers_to_transform")
    if isinstance(wanted, str) and wanted.lower() == "all-linear":
        found = {one.name for one in possible if one.path not in ("embedding", "head")}
    elif isinstance(wanted, str):
        found = _matches([wanted], all_names, "target_modules")[0]
    else:
        for name in names(settings, "target_modules"):
            if not _named([name], all_names):
                raise UnsupportedError(f"target_modules: {name!r} is not supported{nearest(name, SUFFIXES)}")
        found = _named(names(settings, "target_modules"), all_names)
        if some is not None and some != []:
            layers = _layers(settings, possible)
            found = {name for name in found if name in (wanted or ()) or name in layers}
    excluded = settings.get("exclude_modules") or []
    if isinstance(excluded, str):
        found -= _matches([excluded], all_names, "exclude_modules")[0]
    else:
        found -= _named(names(settings, "exclude_modules"), all_names)
    return [one for one in possible if one.name in found]


def _layers(settings: Mapping[str, Any], modules: Sequence[HfModule]) -> set[str]:
    """The names of the modules in the layers that `layers_to_transform` and `layers_pattern` select."""
    some, pattern = settings["layers_to_transform"], settings.get("layers_pattern") or []
    some = [some] if isinstance(some, int) else some
    if not isinstance(some, list) or not all(type(layer) is int for layer in some):
        raise UnsupportedError(f"layers_to_transform: must be a list of numbers, not {some!r}")
    patterns = [pattern] if isinstance(pattern, str) else names(settings, "layers_pattern")
    own = {one.name for one in modules if one.layer in some}
    found = _matches(patterns, sorted(own), "layers_pattern", r"(.*\.)?({})\.\d+\..*")
    return set.union(*found) if patterns else own


def _saved_modules(settings: Mapping[str, Any], modules: Sequence[HfModule], model: Decoder) -> list[HfModule]:
    """The modules that `modules_to_save` trains completely: modules whose name, or the name of a module that contains
    them, ends with one of its names."""
    ends = tuple(names(settings, "modules_to_save"))
    found = []
    for one in modules:
        parts = one.name.split(".")
        if any(".".join(parts[:n]).endswith(ends) for n in range(1, len(parts) + 1) if ends):
            found.append(one)
    for name in ends:
        if not any(name in one.name for one in found):
            raise UnsupportedError(f"modules_to_save: {name!r} is not supported{nearest(name, SUFFIXES)}")
    if model.tie_embeddings and any(one.path == "embedding" for one in found):
        raise UnsupportedError("modules_to_save of an embedding is not supported for tied embeddings")
    return found


def _token_indices(settings: Mapping[str, Any]) -> list[int]:
    """The ids of `trainable_token_indices`: a list, or an object of lists with the key embed_tokens only."""
    key = "trainable_token_indices"
    found = settings.get(key) or []
    if isinstance(found, Mapping):
        for name in found:
            if name != "embed_tokens":
                raise UnsupportedError(f"{key}: {name!r} is not supported, only embed_tokens")
        found = found["embed_tokens"]
    if not isinstance(found, list) or not all(type(one) is int and one >= 0 for one in found):
        raise UnsupportedError(f"{key}: must be a list of token ids, not {found!r}")
    return found


def _by_module(settings: Mapping[str, Any], key: str, modules: Sequence[HfModule]) -> dict[str, Any]:
    """The value of each module in `rank_pattern` or `alpha_pattern`. The first regex that matches the end of the name
    of the module decides."""
    patterns = settings.get(key) or {}
    if not isinstance(patterns, Mapping):
        raise UnsupportedError(f"{key}: must be an object of names, not {patterns!r}")
    found: dict[str, Any] = {}
    matches = _matches(list(patterns), [one.name for one in modules], key, r"(.*\.)?({})")
    for (pattern, value), matching in zip(patterns.items(), matches, strict=True):
        if not matching:
            raise UnsupportedError(f"{key}: {pattern!r} matches no target module")
        found = {**dict.fromkeys(sorted(matching), value), **found}
    return found


def _named(wanted: Sequence[str], all_names: Sequence[str]) -> set[str]:
    """The names that are equal to a wanted name or end with one."""
    return {name for name in all_names if name in wanted or name.endswith(tuple(f".{one}" for one in wanted))}


def _matches(patterns: Sequence[str], all_names: Sequence[str], key: str, form: str = "{}") -> list[set[str]]:
    """The names that each regex, inserted into `form`, matches. A regex of a file could backtrack forever: unless it is
    a plain name, it is matched in a process with a time limit."""
    regexes = [form.replace("{}", pattern) for pattern in patterns]
    if all(re.fullmatch(r"[\w.]+", pattern) for pattern in patterns):
        return [{name for name in all_names if regex.fullmatch(name)} for regex in map(re.compile, regexes)]
    given = json.dumps([regexes, all_names])
    command = [sys.executable, "-I", "-S", "-c", MATCH]
    try:
        done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=REGEX_SECONDS, check=False)  # noqa: S603
    except subprocess.TimeoutExpired:
        raise UnsupportedError(f"{key}: matching takes longer than {REGEX_SECONDS} s; use a simpler regex") from None
    if done.returncode:
        raise UnsupportedError(f"{key}: invalid regex: {done.stderr.strip().splitlines()[-1]}")
    return [{name for name, hit in zip(all_names, hits, strict=True) if hit} for hits in json.loads(done.stdout)]


def base_directory(directory: str | Path) -> tuple[str | None, Path | None]:
    """The base model that an adapter names (a directory or a name on a hub), and its path if it is a directory of this
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
        raise UserError(
            f"{file}: its base {name!r} is not a directory here; set the directory of the base, and adapter.hf"
        )
    return path


def adapter_json(
    adapter: Adapter,
    layers: Mapping[str, tuple[LowRank | None, ...]],
    base: str | None,
    saved: Sequence[str] = (),
    *,
    has_biases: bool = False,
) -> dict[str, Any]:
    """The adapter_config.json of adapters. `layers`: for each module with adapters, the adapters of its layers.
    `saved`: the names of modules that are saved completely; `has_biases`: whether biases of other modules are saved
    too."""
    common = {"task_type": "CAUSAL_LM", "base_model_name_or_path": base, "inference_mode": True}
    if adapter.kind == "prompt":
        own = {"num_virtual_tokens": adapter.virtual_tokens, "num_transformer_submodules": 1}
        return {"peft_type": "PROMPT_TUNING", **common, **own}
    named: dict[str, LowRank] = {}  # by the end of the name of a module
    for path, stack in layers.items():
        name = MODULES[path]
        if len(set(stack)) == 1 and stack[0] is not None:
            named[name.rpartition(".")[2]] = stack[0]
        else:
            named |= {name.format(layer): own for layer, own in enumerate(stack) if own is not None}
    ranks = [one.rank for one in named.values()]
    usual = adapter.rank if adapter.rank in ranks else max(ranks)
    return {
        "peft_type": "LORA",
        **common,
        "r": usual,
        "lora_alpha": _number(adapter.alpha),
        "lora_dropout": adapter.dropout,
        "target_modules": list(named),
        "rank_pattern": {name: one.rank for name, one in named.items() if one.rank != usual},
        "alpha_pattern": {name: _number(one.alpha) for name, one in named.items() if one.alpha != adapter.alpha},
        "modules_to_save": list(saved) or None,
        "trainable_token_indices": list(adapter.token_indices) or None,
        "use_rslora": adapter.rslora,
        "use_dora": adapter.kind == "dora",
        "lora_bias": adapter.lora_bias,
        "bias": "all" if has_biases else "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
    }


def _number(value: float) -> float:
    return int(value) if value.is_integer() else value
