"""Settings that require or exclude other settings; `combinations.yaml` lists most of them. A combination that needs
arithmetic is checked by a function of `check.py` or of the modules that it imports."""

import re
from collections.abc import Iterator
from typing import Any

from jaxmem.config.base import Section, read_table
from jaxmem.config.optimizers import OPTIMIZERS
from jaxmem.config.sections import SOURCES, Config
from jaxmem.errors import as_yaml, required, unsupported

SOURCES_OF = {  # keys of `data` that have an effect only with some sources: these sources
    "path": tuple(name for name, kind in SOURCES.items() if kind.needs_path),
    "field": tuple(name for name, kind in SOURCES.items() if kind.has_field),
    "on_overlong": tuple(name for name, kind in SOURCES.items() if kind.contents in ("chat", "pairs")),
    "on_invalid": tuple(name for name, kind in SOURCES.items() if kind.contents in ("text", "chat", "pairs")),
}
_TABLES = read_table("combinations")


def requirements() -> dict[str, tuple[str, tuple[str, ...]]]:
    """For each key that has an effect only with some values of another key: (the other key, these values)."""
    required: dict[str, tuple[str, tuple[str, ...]]] = {}
    for condition, keys in _TABLES["requires"].items():
        other, _, values = condition.partition("=")
        required |= dict.fromkeys(keys, (other, tuple(values.split("|"))))
    for field in dict.fromkeys(field for entry in OPTIMIZERS.values() for field in entry.fields if field != "kernel"):
        having = tuple(name for name, entry in OPTIMIZERS.items() if field in entry.fields)
        required[f"optimizer.{field}"] = ("optimizer.name", having)
    return required


def check_combinations(cfg: Config) -> Iterator[str]:
    for key, (other, values) in requirements().items():
        path, _, field = key.rpartition(".")
        if (info := getattr(type(value_of(cfg, path)), "model_fields", {}).get(field)) is None:
            continue  # another family of models
        value = value_of(cfg, key)
        actual = value_of(cfg, other)
        if value != info.default and actual not in values:
            yield required(f"{key}={as_yaml(value)}", other, values, actual)
    for setting, key, use in _TABLES["needs"]:
        if (given := _matching(cfg, setting)) and not value_of(cfg, key):
            yield f"{given} requires {key}; {use}"
    for setting, excluded, use in _TABLES["conflicts"]:
        given = _matching(cfg, setting)
        other = _matching(cfg, excluded)
        if given and other:
            yield unsupported(given, other, use)


def _matching(cfg: Config, term: str) -> str:
    """The setting of a config as `key=value` if a term of the tables describes it, otherwise an empty text."""
    matching = []
    for part in term.split(" with "):
        key, operator, expected = re.split("(!?=)", part)
        value = value_of(cfg, key)
        items = map(as_yaml, (value, *value) if isinstance(value, tuple) else (value,))
        if any(item in expected.split("|") for item in items) == (operator == "!="):
            return ""
        matching.append(key if expected == "[]" or isinstance(value, Section) else f"{key}={as_yaml(value)}")
    return " with ".join(matching)


def value_of(cfg: Config, key: str) -> Any:
    """The value of a key; None if the family of the model does not have it."""
    value: Any = cfg
    for field in key.split("."):
        value = getattr(value, field, None)
    return value
