"""Pydantic's errors as lines: the key, its value, pydantic's text, and the nearest name."""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from jaxmem.config.base import literals, must_be, read_table
from jaxmem.config.sections import Config
from jaxmem.errors import as_yaml
from jaxmem.typing import JsonView

_NAMES = read_table("other_names")
ELSEWHERE = {name: setting for setting, names in _NAMES["elsewhere"].items() for name in names}
UNNEEDED = {name: reason for reason, names in _NAMES["unneeded"].items() for name in names}
VALUES: dict[str, list[str]] = _NAMES["values"]  # names that other tools have for a value
SELECTORS = ("name", "kind")  # keys whose value is often written in place of their section
HINTS: dict[str, str] = _NAMES["missing"]  # what to do if a key is missing or has a value of another type
Key = tuple[int | str, ...]


def explain(error: ValidationError, raw: JsonView) -> str:
    """The message of a validation error of these settings, with one line per problem."""
    errors: dict[Key, list[ErrorDetails]] = {}
    for item in error.errors(include_url=False):
        errors.setdefault(_key(item, raw), []).append(item)
    # For a value that may be a text or a mapping, the errors of the given mapping are the ones that help.
    deepest = [key for key in errors if not any(other[: len(key)] == key for other in errors if other != key)]
    shape = [key for key in deepest if key[:1] == ("model",) and len(key) == 2 and _is_missing(errors[key])]
    lines = [_line(key, errors[key], raw) for key in deepest if key not in shape]
    if shape:
        lines.append(f"model.preset is missing; set it, or model.hf, or all of {', '.join(map(_dotted, shape))}")
    return "\n".join(" ".join(line.splitlines()) for line in lines)


def key_of_option(option: str) -> str:
    """A hint for an option such as --learning-rate that no command has: the key that it could mean, if there is one."""
    hint = _nearest_key((), option.lstrip("-").replace("-", "_"), value=True)
    return "" if "expected one of" in hint else hint.removeprefix("; ")


def _key(error: ErrorDetails, raw: JsonView) -> Key:
    """The location of an error in the settings, without what pydantic inserts for a union."""
    key: list[int | str] = []
    value: Any = raw
    for part in error["loc"]:
        is_item = isinstance(value, Sequence) and isinstance(part, int) and part < len(value)
        if is_item or (isinstance(value, Mapping) and part in value):
            value = value[part]
            key.append(part)
    return (*key, error["loc"][-1]) if error["type"] == "missing" else tuple(key)


def _is_missing(errors: Sequence[ErrorDetails]) -> bool:
    return errors[0]["type"] == "missing"


def _line(key: Key, errors: Sequence[ErrorDetails], raw: JsonView) -> str:
    name = _dotted(key)
    kind = errors[0]["type"]
    if _is_missing(errors):
        return f"{name} is missing" + (f"; {HINTS[name]}" if name in HINTS else "")
    value: Any = raw
    for part in (*key, "family") if kind == "union_tag_invalid" else key:
        value = value[part]
    if kind == "extra_forbidden":
        return f"{name}: unknown key{_nearest_key(key[:-1], str(key[-1]), value)}"
    if kind == "union_tag_invalid":
        name += ".family"
    words = [word for error in errors for word in literals(error)]
    known = [word for word in words if str(value).lower() in VALUES.get(word, ())]
    close = known or difflib.get_close_matches(str(value).lower(), words, n=1)
    selector = [key for key, _ in _keys(Config, ()) if key[:-1] == (name,) and key[-1] in SELECTORS]
    shown = as_yaml(value)
    if close:
        hint = f"; did you mean {close[0]}?"
    elif selector and isinstance(value, str):
        known_name = next((word for word, names in VALUES.items() if value.lower() in names), shown)
        hint = f"; use {_dotted(selector[0])}={known_name}"
    else:
        hint = f"; {HINTS[name]}" if name in HINTS and name != "name" else ""
    return f"{name or 'config'}={shown if len(shown) <= 60 else shown[:57] + '...'} must be {must_be(errors)}{hint}"


def _dotted(key: Key) -> str:
    """A location as a key such as `data.mixture[0].path`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in key).removeprefix(".")


def _nearest_key(section: Key, name: str, value: object) -> str:
    """A hint for an unknown key: the key that has this name in other tools, a similar name in the same section, or the
    same name in another section. A key whose value is false or null is removed if that changes nothing."""
    keys = dict(_keys(Config, ()))
    removal = f"; remove it, since it is {as_yaml(value)}" if value is None or value is False else None
    for given in (_dotted((*section, name)), name):
        if given in ELSEWHERE:
            field = keys.get(tuple(re.split(r"[^\w.]", ELSEWHERE[given])[0].split(".")))
            has_effect = field is not None and field.default != value and type(value) in _types(field.annotation)
            return f"; use {ELSEWHERE[given]}" if removal is None or has_effect else removal
        if given in UNNEEDED:
            return f"; remove it: {UNNEEDED[given]}"
    path = [part for part in section if isinstance(part, str)]
    known = {key[-1]: _dotted((*section, key[-1])) for key in keys if [*key[:-1]] == path}
    if close := difflib.get_close_matches(name.lower(), known, n=1):
        return f"; did you mean {known[close[0]]}?"
    if removal is not None and not path:
        return removal
    # Options of `jaxmem generate` have the names of keys of unrelated sections (tokens, temperature).
    elsewhere = [key for key in keys if len(key) == 2 and key[-1] == name and path[:1] != ["generate"]]
    if elsewhere:
        return f"; did you mean {_dotted(elsewhere[0])}?"
    return f"; expected one of {', '.join(sorted(known.values()))}"


def _keys(section: type[BaseModel], path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], FieldInfo]]:
    """The keys of a section and of the sections within it, with their fields."""
    for name, field in section.model_fields.items():
        yield (*path, name), field
        for inner in _sections(field.annotation):
            yield from _keys(inner, (*path, name))


def _types(annotation: object) -> Iterator[object]:
    """A type, its alternatives and the types of its items."""
    yield annotation
    for argument in get_args(annotation):
        yield from _types(argument)


def _sections(annotation: object) -> Iterator[type[BaseModel]]:
    """The sections among the alternatives of a type, or of the items of a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _sections(argument)
