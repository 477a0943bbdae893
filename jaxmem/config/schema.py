"""The JSON schema of configs, for editors and docs/config.md."""

from typing import Any

from jaxmem.config.check import REQUIRES
from jaxmem.config.check_adapter import FIELDS
from jaxmem.config.check_data import CHATS, HAS_FIELDS, NEEDS_PATH
from jaxmem.config.networks import FAMILIES, Decoder
from jaxmem.config.optimizers import OPTIMIZERS
from jaxmem.config.presets import PRESETS
from jaxmem.config.sections import Config


def json_schema() -> dict[str, Any]:
    """The schema that pydantic generates, with the short forms that `load_config` expands."""
    schema = Config.model_json_schema()
    sections = schema["$defs"]
    for key, (other, values) in requirements().items():
        section, field = key.split(".")
        described = sections[section.capitalize()]["properties"][field]
        described["description"] += f"; only with {other}: {', '.join(values)}"

    objective = schema["properties"]["objective"]
    objective["anyOf"] = [
        {"$ref": objective.pop("$ref")},
        {"enum": sections["Objective"]["properties"]["name"]["enum"]},
    ]

    for kind in FAMILIES.values():  # a model without `family` is a decoder
        if kind is not Decoder:
            sections[kind.__name__].setdefault("required", []).append("family")
    decoder = sections["Decoder"]
    preset = decoder["properties"]["preset"]
    decoder["properties"]["preset"] = {**preset, "enum": [*PRESETS, None]}
    del decoder["properties"]["preset"]["anyOf"]
    decoder["anyOf"] = [
        {"required": ["hf"], "properties": {"hf": {"type": "string"}}},
        {"required": ["preset"], "properties": {"preset": {"enum": list(PRESETS)}}},
        {"required": decoder.pop("required")},
    ]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def requirements() -> dict[str, tuple[str, tuple[str, ...]]]:
    """For each key that has an effect only with some values of another key: (the other key, these values)."""
    found = {**REQUIRES, "data.path": ("data.source", NEEDS_PATH), "data.field": ("data.source", HAS_FIELDS)}
    found["data.on_overlong"] = ("data.source", CHATS)
    found["data.on_invalid"] = ("data.source", (*CHATS, *HAS_FIELDS))
    found |= {f"adapter.{field}": ("adapter.kind", kinds) for field, kinds in FIELDS.items()}
    for field in {field for entry in OPTIMIZERS.values() for field in entry.fields} - {"kernel"}:
        having = tuple(name for name, entry in OPTIMIZERS.items() if field in entry.fields)
        found[f"optimizer.{field}"] = ("optimizer.name", having)
    return found
