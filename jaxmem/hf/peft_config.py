"""Adapters as a PEFT `adapter_config.json`: patterns of modules and layers, each with its rank."""

from collections.abc import Mapping, Sequence

from jaxmem.config import Adapter
from jaxmem.config.adapter import LowRank
from jaxmem.config.names import split_stack
from jaxmem.typing import JsonDict


def adapter_json(
    adapter: Adapter,
    layers: Mapping[str, tuple[LowRank | None, ...]],
    base: str | None,
    saved: Sequence[str] = (),
    *,
    names: Mapping[str, str],
    has_biases: bool = False,
) -> JsonDict:
    """The adapter_config.json of adapters. `layers`: for each module with adapters, the adapters of its layers.
    `saved`: the names of modules that are saved completely; `has_biases`: whether biases of other modules are saved
    too. `names`: the names of the modules of the family. PEFT converts adapters of experts for transformers 5, which
    has one tensor for gate and up of all experts; it requires that their rank is `r`. The conversion also removes other
    linear layers from `target_modules` if their names end like those of experts (dense layers, shared experts), so
    these are in `target_parameters`."""
    common = {"task_type": "CAUSAL_LM", "base_model_name_or_path": base, "inference_mode": True}
    if adapter.kind == "prompt":
        settings = {"num_virtual_tokens": adapter.virtual_tokens, "num_transformer_submodules": 1}
        return {"peft_type": "PROMPT_TUNING", **common, **settings}
    named: dict[str, LowRank] = {}  # keys: the last part of a module's name, or its complete name
    of_experts = {name.rpartition(".")[2] for name in names.values() if name.count("{}") > 1}
    alike = {path for path, name in names.items() if name.count("{}") < 2 and name.rpartition(".")[2] in of_experts}
    ends = {path: ".".join(name.split(".")[-2 if path in alike else -1 :]) for path, name in names.items()}
    parameters: list[str] = []
    for end in dict.fromkeys(ends[path] for path in layers):
        paths = [path for path, other in ends.items() if other == end]
        before = len(named)
        stacks = {path: layers.get(path, (None,)) for path in paths}
        different = {lora for stack in stacks.values() for lora in stack}
        first = next(iter(different), None)
        if len(different) == 1 and first is not None:
            named[end] = first
        else:
            for path, stack in stacks.items():
                numbered = zip(split_stack(path)[1] or range(len(stack)), stack, strict=False)
                named |= {names[path].format(layer): lora for layer, lora in numbered if lora is not None}
        if paths[0] in alike:
            parameters += list(named)[before:]
    keys = {name: f"{name}.weight" if name in parameters else name for name in named}
    ranks = [lora.rank for lora in named.values()]
    usual = adapter.rank if adapter.rank in ranks else max(ranks)
    usual = next((stack[0].rank for path, stack in layers.items() if names[path].count("{}") > 1 and stack[0]), usual)
    return {
        "peft_type": "LORA",
        **common,
        "r": usual,
        "lora_alpha": _number(adapter.alpha),
        "lora_dropout": adapter.dropout,
        "target_modules": [name for name in named if name not in parameters],
        **({"target_parameters": [keys[name] for name in parameters]} if parameters else {}),
        "rank_pattern": {keys[name]: lora.rank for name, lora in named.items() if lora.rank != usual},
        "alpha_pattern": {
            keys[name]: _number(lora.alpha) for name, lora in named.items() if lora.alpha != adapter.alpha
        },
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
