"""The JSON schema of configs, for editors."""

from __future__ import annotations

from typing import Any

from jaxmem.config.networks import FAMILIES, Decoder
from jaxmem.config.presets import PRESETS
from jaxmem.config.sections import Config


def json_schema() -> dict[str, Any]:
    """The schema that pydantic generates, with the short forms that `load_config` expands."""
    schema = Config.model_json_schema()
    sections = schema["$defs"]

    objective = schema["properties"]["objective"]
    objective["anyOf"] = [
        {"$ref": objective.pop("$ref")},
        {"enum": sections["Objective"]["properties"]["name"]["enum"]},
    ]

    for kind in FAMILIES.values():  # a model that does not say is a decoder
        if kind is not Decoder:
            sections[kind.__name__].setdefault("required", []).append("family")
    decoder = sections["Decoder"]
    decoder["properties"]["preset"] = {"enum": [*PRESETS, None], "default": None}
    decoder["anyOf"] = [
        {"required": ["hf"], "properties": {"hf": {"type": "string"}}},
        {"required": ["preset"], "properties": {"preset": {"enum": list(PRESETS)}}},
        {"required": decoder.pop("required")},
    ]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
