"""Pydantic's errors as lines (the key, the given value, the allowed values), and the JSON schema of configs for editors
and docs/config.md."""

import difflib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from jaxmem.config.base import allowed
from jaxmem.config.combinations import OF_SOURCES, requirements
from jaxmem.config.networks import FAMILIES, Decoder
from jaxmem.config.optimizers import OPTIMIZERS
from jaxmem.config.presets import PRESETS
from jaxmem.config.renamed import OTHER_NAMES
from jaxmem.config.sections import Config
from jaxmem.errors import as_yaml, required

ELSEWHERE = {name: setting for setting, names in OTHER_NAMES["elsewhere"].items() for name in names}


def explain(error: ValidationError, raw: Mapping[str, Any]) -> str:
    """The message of a validation error of these settings, with one line per problem."""
    errors = error.errors(include_url=False)
    missing = [item for item in errors if item["type"] == "missing" and item["loc"][:-1] == ("model", "decoder")]
    lines = [_line(item, raw) for item in errors if item not in missing]
    if missing:
        keys = ", ".join(_dotted(_declared(item["loc"])[0]) for item in missing)
        lines.append(f"model.preset is missing; set it, or model.hf, or all of {keys}")
    return "\n".join(" ".join(line.splitlines()) for line in dict.fromkeys(lines))


def key_of_option(option: str) -> str:
    """A hint for an option such as --learning-rate that no command has: the key that it could mean, if there is one."""
    hint = _nearest_key((), option.lstrip("-").replace("-", "_"), _schema())
    return "" if "expected one of" in hint else hint


def _schema() -> dict[str, Any]:
    return _schema_with((*OPTIMIZERS,), (*FAMILIES.values(),))


@lru_cache(maxsize=1)
def _schema_with(_optimizers: tuple[str, ...], _families: tuple[type, ...]) -> dict[str, Any]:
    """The schema with these registered optimizers and families."""
    return Config.model_json_schema()


def _line(error: ErrorDetails, raw: Mapping[str, Any]) -> str:
    key, schema, rest = _declared(error["loc"])
    if error["type"] == "extra_forbidden" and len(rest) == 1:
        return f"{_dotted((*key, *rest))}: unknown key{_nearest_key(key, str(rest[0]), schema)}"
    if error["type"] == "missing" and isinstance(key[-1], str) and not rest:
        hint = OTHER_NAMES["missing"].get(key[0]) if len(key) < 3 else None  # not for sections within sections
        return f"{_dotted(key)} is missing" + (f"; {hint}" if hint else "")
    if error["type"] == "missing" and not rest:  # an item of a list
        key, schema, _ = _declared(key[:-1])
    if error["type"] == "union_tag_invalid":
        key, schema = (*key, "family"), {"enum": list(schema["discriminator"]["mapping"])}
    value: Any = raw
    for part in key:
        value = value[part]
    if error["type"] == "none_required":
        return required(f"{_dotted(key)}={_shown(value)}", "model.family", ["decoder"], error["loc"][1])
    words = [word for part in _members(schema) for word in (part.get("const"), *part.get("enum", ())) if word]
    close = difflib.get_close_matches(str(value).lower(), map(str, words), n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    if isinstance(value, int | float) and any(part.get("type") == "string" for part in _members(schema) if not words):
        hint = f'; use "{as_yaml(value)}"'
    shown = _shown(value)
    is_whole = isinstance(value, float) and value.is_integer() and 0 < value < 2**53
    if is_whole and any(part.get("type") == "integer" for part in _members(schema)):  # 1e9 is a float in YAML
        shown, hint = repr(value), f"; use {int(value)}"
    if key == ("model",):
        hint = f"; {OTHER_NAMES['missing']['model']}"
    elif "properties" in schema and key:
        hint = f"; set its keys, such as {_dotted((*key, next(iter(schema['properties']))))}"
    must_be = allowed(schema).replace("a number", "a finite number" if error["type"] == "finite_number" else "a number")
    return f"{_dotted(key) or 'config'}={shown} must be {must_be}{hint}"


def _shown(value: object) -> str:
    text = as_yaml(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _declared(location: Sequence[int | str]) -> tuple[tuple[int | str, ...], dict[str, Any], tuple[int | str, ...]]:
    """The part of a location that the config declares, its JSON schema, and the rest: an unknown key, or what pydantic
    appends for a union. The family that pydantic inserts after `model` is left out."""
    schema = _schema()
    found: list[int | str] = []
    sections = schema["$defs"]
    for at, part in enumerate(location):
        if part in (family := schema.get("discriminator", {"mapping": {}})["mapping"]):
            inner: Any = {"$ref": family[part]}
        else:
            inner = next((one for member in _sections(schema, sections) if (one := _inner(member, part))), None)
            if inner is None:
                return tuple(found), schema, tuple(location[at:])
            found.append(part)
        schema = sections[inner["$ref"].rpartition("/")[2]] if "$ref" in inner else inner
    return tuple(found), schema, ()


def _members(schema: Mapping[str, Any]) -> list[Any]:
    """The schemas of the members of a union, otherwise the schema itself."""
    return schema.get("anyOf", [schema])


def _sections(schema: Mapping[str, Any], sections: Mapping[str, Any]) -> list[Any]:
    """The members of a union, where references are replaced with the sections."""
    return [sections.get(one.get("$ref", "").rpartition("/")[2], one) for one in _members(schema)]


def _inner(schema: Mapping[str, Any], part: int | str) -> Any:
    """The schema of a key of a section, or of an item of a list."""
    if isinstance(part, str):
        return schema.get("properties", {}).get(part)
    return schema.get("items") or next(iter(schema.get("prefixItems", ())), None)


def _dotted(key: Sequence[int | str]) -> str:
    """A location as a key such as `data.mixture[0].path`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in key).removeprefix(".")


def _nearest_key(section: Sequence[int | str], name: str, schema: Mapping[str, Any]) -> str:
    """A hint for an unknown key: the key that has this name in other tools, a similar name in the same section, or the
    same name in another section."""
    if name in ELSEWHERE:
        return f"; use {ELSEWHERE[name]}"
    sections = _schema()["$defs"]
    known = {key: _dotted((*section, key)) for one in _sections(schema, sections) for key in one.get("properties", ())}
    if close := difflib.get_close_matches(name.lower(), known, n=1):
        return f"; did you mean {known[close[0]]}?"
    # Options of `jaxmem generate` have the names of keys of unrelated sections (tokens, temperature).
    for other in Config.model_fields if section[:1] != ("generate",) else ():
        _, fields, _ = _declared([other, "decoder"] if other == "model" else [other])
        if name in fields.get("properties", {}):
            return f"; did you mean {other}.{name}?"
    return f"; expected one of {', '.join(sorted(known.values()))}"


def json_schema() -> dict[str, Any]:
    """The schema that pydantic generates, with the short forms that `load_config` expands."""
    schema = Config.model_json_schema()
    sections = schema["$defs"]
    for key, (other, values) in {**requirements(), **OF_SOURCES}.items():
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
