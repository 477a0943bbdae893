"""Pydantic's errors as lines: the key, what was given, what is allowed."""

import difflib
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from jaxmem.config.base import Section
from jaxmem.config.networks import FAMILIES
from jaxmem.config.sections import Config
from jaxmem.errors import required

# The allowed values, by pydantic's name of an error.
ALLOWED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text, in quotes if it looks like a number",
    "tuple_type": "a list",
    "model_type": "a mapping of keys to values",
    "model_attributes_type": "a mapping of keys to values",
    "greater_than": "more than {gt:g}",
    "greater_than_equal": "at least {ge:g}",
    "less_than": "less than {lt:g}",
    "less_than_equal": "at most {le:g}",
    "too_short": "a list of at least {min_length} values",
    "too_long": "a list of at most {max_length} values",
    "string_pattern_mismatch": "text of the form {pattern}",
}

# Names that other tools use for a setting, and the setting.
ELSEWHERE = {
    **dict.fromkeys(("lr", "learning_rate"), "optimizer.learning_rate"),
    **dict.fromkeys(("batch_size", "train_batch_size", "global_batch_size"), "batch.global_size"),
    "per_device_train_batch_size": "batch.global_size, which counts the rows of all devices",
    **dict.fromkeys(("gradient_accumulation_steps", "grad_accum", "accumulation_steps"), "batch.accumulate"),
    **dict.fromkeys(("max_steps", "num_steps", "iterations"), "train.steps"),
    **dict.fromkeys(("epochs", "num_epochs", "num_train_epochs"), "data.epochs; training still stops at train.steps"),
    **dict.fromkeys(("max_length", "max_seq_len", "max_seq_length", "seq_len", "sequence_len"), "data.sequence_length"),
    **dict.fromkeys(("r", "lora_r"), "adapter.rank"),
    "lora_alpha": "adapter.alpha",
    "lora_dropout": "adapter.dropout",
    "target_modules": "adapter.targets",
    "load_in_4bit": "adapter.kind=qlora",
    **dict.fromkeys(("model_name_or_path", "base_model"), "model.hf, a directory"),
    "bf16": "precision.compute=bfloat16 for the computation, precision.parameters=bfloat16 for the weights",
    "fp16": "precision.compute=float16 with precision.loss_scale=dynamic",
    **dict.fromkeys(
        ("gradient_checkpointing", "activation_checkpointing", "activation_checkpoint", "ac"), "memory.remat=full"
    ),
    **dict.fromkeys(("dp", "dp_replicate", "data_parallel_replicate_degree"), "mesh.replica"),
    **dict.fromkeys(("dp_shard", "data_parallel_shard_degree"), "mesh.fsdp"),
    **dict.fromkeys(("tp", "tensor_parallel_degree"), "mesh.tensor"),
    **dict.fromkeys(("pp", "pipeline_parallel_degree"), "mesh.stage"),
    **dict.fromkeys(("cp", "context_parallel_degree"), "mesh.context"),
    **dict.fromkeys(("zero_stage", "zero_optimization"), "zero"),
    "betas": "optimizer.beta1 and optimizer.beta2",
    "warmup_steps": "optimizer.warmup",
    "max_grad_norm": "optimizer.clip",
    "output_dir": "output",
    "eval_steps": "train.evaluate_every",
    "save_steps": "checkpoint.every",
    "logging_steps": "train.log_every",
}
MISSING = {"train": "set train.steps or train.tokens", "model": "set model.preset or model.hf"}


def explain(error: ValidationError) -> str:
    """The message of a validation error, with one line per problem."""
    errors = error.errors(include_url=False)
    missing = [item for item in errors if item["type"] == "missing" and item["loc"][:2] == ("model", "decoder")]
    lines = list(dict.fromkeys(_line(item, errors) for item in errors if item not in missing))
    if missing:
        lines.append(
            f"model.preset is missing; set it, or model.hf, or {', '.join(_dotted(item['loc']) for item in missing)}"
        )
    return "\n".join(" ".join(line.splitlines()) for line in lines)


def _line(error: ErrorDetails, errors: list[ErrorDetails]) -> str:
    location, kind, value = error["loc"], error["type"], error["input"]
    key = _dotted(location)
    if rest := _member(error):
        of_key = location[: len(location) - len(rest)]
        others = [one for one in errors if one["loc"][: len(of_key)] == of_key]
        inside = next((one for one in others if len(_member(one)) > 1), None)
        if inside is None:
            return _of_union(of_key, value, others)
        location, error, kind, value = (*of_key, *_member(inside)[1:]), inside, inside["type"], inside["input"]
        key = _dotted(location)
    match kind:
        case "extra_forbidden":
            return f"{key}: unknown key{_nearest_key(location)}"
        case "missing":
            return f"{key} is missing" + (f"; {MISSING[key]}" if key in MISSING else "")
        case "none_required":
            return required(f"{key}={value}", "model.family", ["decoder"], location[1])
        case "literal_error":
            return f"{key}={_unknown(value, _choices(location))}"
        case "union_tag_invalid":
            return f"{key}.family={_unknown(value['family'], list(FAMILIES))}"
    allowed = _allowed(error)
    if allowed is None:
        return f"{key}={_short(value)}: {error['msg']}"
    return f"{key}={_short(value)} must be {allowed}"


def _allowed(error: ErrorDetails) -> str | None:
    text = ALLOWED.get(error["type"])
    return None if text is None else text.format(**error.get("ctx", {}))


def _of_union(location: tuple[int | str, ...], value: object, errors: list[ErrorDetails]) -> str:
    """The line for a key with several types of value, with the values that are allowed for each type."""
    kinds = list(dict.fromkeys(filter(None, map(_allowed, errors))))
    choices = _choices(location)
    allowed = ", or ".join([", ".join(choices), *kinds])
    return f"{_dotted(location)}={_short(value)} must be {allowed}{_hint(value, choices)}"


def _member(error: ErrorDetails) -> tuple[int | str, ...]:
    """The part that pydantic appends to the location of a union: its name for a member type, and the place within
    it."""
    annotation: Any = Config
    for at, part in enumerate(error["loc"]):
        if (at, error["loc"][0]) == (1, "model"):
            annotation = FAMILIES.get(str(part), Section)
        elif not isinstance(part, int):
            sections = [one for one in _inside(annotation) if isinstance(one, type) and issubclass(one, Section)]
            if not sections or part not in sections[0].model_fields:
                rest = error["loc"][at:]
                return () if len(rest) == 1 and error["type"] == "extra_forbidden" else rest
            annotation = sections[0].model_fields[part].annotation
    return ()


def _dotted(location: tuple[int | str, ...]) -> str:
    """A location as a key such as `data.mixture[0].path`, without the family that pydantic inserts after `model`."""
    parts = [part for at, part in enumerate(location) if (at, location[0]) != (1, "model")]
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts).removeprefix(".")


def _unknown(value: object, choices: list[str]) -> str:
    return f"{_short(value)} is unknown; expected one of {', '.join(choices)}{_hint(value, choices)}"


def _hint(value: object, choices: list[str]) -> str:
    close = difflib.get_close_matches(str(value), choices, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _inside(annotation: Any) -> Iterator[Any]:
    yield annotation
    if get_origin(annotation) is not Literal:
        for part in get_args(annotation):
            yield from _inside(part)


def _section(annotation: Any) -> type[Section]:
    return next(part for part in _inside(annotation) if isinstance(part, type) and issubclass(part, Section))


def _declared(location: tuple[int | str, ...]) -> Any:
    """The declared type of a location in the config."""
    annotation: Any = Config
    for at, part in enumerate(location):
        if (at, location[0]) == (1, "model"):
            annotation = FAMILIES[str(part)]
        elif not isinstance(part, int):
            annotation = _section(annotation).model_fields[part].annotation
    return annotation


def _choices(location: tuple[int | str, ...]) -> list[str]:
    return [
        str(choice) for part in _inside(_declared(location)) if get_origin(part) is Literal for choice in get_args(part)
    ]


def _nearest_key(location: tuple[int | str, ...]) -> str:
    """A hint for an unknown key: the key that has this name in other tools, a similar name in the same section, or the
    same name in another section."""
    *parent, name = location
    section = _section(_declared(tuple(parent)))
    prefix = _dotted(tuple(parent))
    prefix += "." if prefix else ""
    if name in ELSEWHERE:
        return f"; use {ELSEWHERE[str(name)]}"
    close = difflib.get_close_matches(str(name), section.model_fields, n=1)
    if close:
        return f"; did you mean {prefix}{close[0]}?"
    for other, field in Config.model_fields.items():
        for inner in _inside(field.annotation):
            if isinstance(inner, type) and issubclass(inner, Section) and name in inner.model_fields:
                return f"; did you mean {other}.{name}?"
    return f"; known: {', '.join(sorted(prefix + known for known in section.model_fields))}"
