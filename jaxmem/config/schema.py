"""The JSON schema of configs, for editors and docs/config.md."""

from jaxmem.config.combinations import SOURCES_OF, requirements
from jaxmem.config.networks import FAMILIES, Decoder
from jaxmem.config.presets import PRESETS
from jaxmem.config.sections import Config
from jaxmem.typing import JsonDict


def json_schema() -> JsonDict:
    """The schema that pydantic generates, with the short forms that `load_config` expands."""
    schema = Config.model_json_schema()
    sections = schema["$defs"]
    model = schema["properties"]["model"]
    for name, kind in FAMILIES.items():
        if name not in model["discriminator"]["mapping"]:  # registered by a script
            of_kind = kind.model_json_schema()
            sections |= {**of_kind.pop("$defs", {}), kind.__name__: of_kind}
            model["discriminator"]["mapping"][name] = f"#/$defs/{kind.__name__}"
            model["oneOf"].append({"$ref": f"#/$defs/{kind.__name__}"})
    of_sources = {f"data.{field}": ("data.source", sources) for field, sources in SOURCES_OF.items()}
    for key, (other, values) in {**requirements(), **of_sources}.items():
        *_, section, field = key.split(".")
        if section != "model":
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
