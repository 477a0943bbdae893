"""Keys and values of the previous release and their new names: `load_config` accepts both for one release."""

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from jaxmem.config.tables import read_table

OTHER_NAMES = read_table("other_names")
KEYS: dict[str, str] = OTHER_NAMES["renamed"]
VALUES: dict[str, dict[object, object]] = OTHER_NAMES["values"]


class OldNameWarning(FutureWarning):
    """A config uses names that the next release does not accept."""


def rename(raw: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The config with the new names, and a line `old -> new` for each that changed.

    >>> rename({"name": "a", "adapter": {"faster": 16}})
    ({'name': 'a', 'adapter': {'lora_plus_ratio': 16}}, ['adapter.faster -> adapter.lora_plus_ratio'])
    """
    changes: list[str] = []

    def renamed(section: str, fields: Any) -> Any:
        if not isinstance(fields, Mapping):
            return fields
        found: dict[str, Any] = {}
        for key, value in fields.items():
            new: str = KEYS.get(f"{section}.{key}") or key
            values = VALUES.get(f"{section}.{new}", {})
            found[new] = values.get(value, value) if isinstance(value, str) else value
            if new != key:
                changes.append(f"{section}.{key} -> {section}.{new}")
            elif found[new] is not value:
                changes.append(f"{section}.{key}={value} -> {str(found[new]).lower()}")
        return found

    return {section: renamed(section, fields) for section, fields in raw.items()}, changes


def warn_of(changes: Iterable[str]) -> None:
    """One warning with all old names and the new ones."""
    if lines := list(dict.fromkeys(changes)):
        text = f"these config keys have new names; rename them before the next release: {', '.join(lines)}"
        warnings.warn(text, OldNameWarning, stacklevel=3)
