"""The tables of this package in YAML files."""

from importlib.resources import files
from typing import Any

import yaml

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # PyYAML may lack its parser in C, which is ten times as fast


def read_table(name: str) -> Any:
    text = files(__package__).joinpath(f"{name}.yaml").read_text(encoding="utf-8")
    return yaml.load(text, _LOADER)  # noqa: S506, a safe loader
