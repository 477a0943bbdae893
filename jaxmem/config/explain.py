"""Pydantic's complaints as lines that someone can act on: the key, what was given, what is allowed."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from jaxmem.config.sections import FAMILIES, Config, Section

# What pydantic calls a mistake, and what would have been right.
ALLOWED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text, in quotes where it looks like something else",
    "tuple_type": "a list",
    "model_type": "a section, with keys of its own",
    "model_attributes_type": "a section, with keys of its own",
    "greater_than": "more than {gt:g}",
    "greater_than_equal": "at least {ge:g}",
    "less_than": "less than {lt:g}",
    "less_than_equal": "at most {le:g}",
    "too_short": "of at least {min_length} values",
    "too_long": "of at most {max_length} values",
}


def explain(error: ValidationError) -> str:
    """One line a problem."""
    errors = error.errors(include_url=False)
    missing = [item for item in errors if item["type"] == "missing" and item["loc"][:2] == ("model", "decoder")]
    lines = [_line(item) for item in errors if item not in missing]
    if missing:
        lines.append(
            f"model.preset: missing; give one, or model.hf, or {', '.join(_dotted(item['loc']) for item in missing)}"
        )
    return "\n".join(" ".join(line.splitlines()) for line in lines)


def _line(error: ErrorDetails) -> str:
    location, kind, given = error["loc"], error["type"], error["input"]
    key = _dotted(location)
    match kind:
        case "extra_forbidden":
            return f"{key}: unknown key{_nearest_key(location)}"
        case "missing":
            return f"{key}: missing"
        case "none_required":
            return f"{key}: only family decoder has presets, {location[1]} has none"
        case "literal_error":
            return f"{key}: {_one_of(given, _choices(location))}"
        case "union_tag_invalid":
            return f"{key}.family: {_one_of(given['family'], list(FAMILIES))}"
    allowed = ALLOWED.get(kind)
    if allowed is None:
        return f"{key}: {error['msg']}, not {_short(given)}"
    return f"{key}: must be {allowed.format(**error.get('ctx', {}))}, not {_short(given)}"


def _dotted(location: tuple[int | str, ...]) -> str:
    """`model.layers` and `data.mixture[0].path`: without the family that pydantic puts after `model`."""
    parts = [part for at, part in enumerate(location) if (at, location[0]) != (1, "model")]
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts).removeprefix(".")


def _one_of(given: object, choices: list[str]) -> str:
    close = difflib.get_close_matches(str(given), choices, n=1)
    return f"{_short(given)} is not one of {', '.join(choices)}" + (f"; did you mean {close[0]}?" if close else "")


def _short(given: object) -> str:
    text = repr(given)
    return text if len(text) <= 60 else text[:57] + "..."


def _inside(annotation: Any) -> Iterator[Any]:
    yield annotation
    if get_origin(annotation) is not Literal:
        for part in get_args(annotation):
            yield from _inside(part)


def _section(annotation: Any) -> type[Section]:
    return next(part for part in _inside(annotation) if isinstance(part, type) and issubclass(part, Section))


def _declared(location: tuple[int | str, ...]) -> Any:
    """The type declared at a place in the config."""
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
    """A key with nearly that name in the same section, or with exactly that name in another one."""
    *parent, name = location
    section = _section(_declared(tuple(parent)))
    prefix = _dotted(tuple(parent))
    prefix += "." if prefix else ""
    close = difflib.get_close_matches(str(name), section.model_fields, n=1)
    if close:
        return f"; did you mean {prefix}{close[0]}?"
    for other, field in Config.model_fields.items():
        for inner in _inside(field.annotation):
            if isinstance(inner, type) and issubclass(inner, Section) and name in inner.model_fields:
                return f"; did you mean {other}.{name}?"
    return f"; known: {', '.join(sorted(prefix + known for known in section.model_fields))}"
