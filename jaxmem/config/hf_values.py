"""Values of a config.json or adapter_config.json. Each key is understood, known to be without effect, or refused by
its name."""

import json
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from jaxmem.errors import UserError

MAX_BYTES = 16 << 20  # a limit above the size of all such files, since the content of a file is not trusted
MAX_SIZE = 1 << 31  # a limit above all dimensions of models, checked before any array is created


class UnsupportedError(Exception):
    """A setting is not supported, or a value has the wrong type. The caller adds the name of the file."""


def read_json(file: Path) -> dict[str, Any]:
    """The object that a JSON file contains."""
    try:
        if file.stat().st_size > MAX_BYTES:
            raise UserError(f"{file}: larger than {MAX_BYTES >> 20} MiB, the limit for such files")
        text = file.read_bytes()
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}") from error
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file}: invalid JSON: {error}") from error
    if not isinstance(found, dict):
        raise UserError(f"{file}: must contain an object, not {type(found).__name__}")
    return found


def check_keys(
    settings: Mapping[str, Any],
    understood: Collection[str],
    fixed: Mapping[str, tuple[Any, ...]],
    without_effect: Collection[str] = (),
    section: str = "",
) -> None:
    """Refuses values of `fixed` keys that are not among those supported, and unknown keys, unless they are null, false
    or empty. `without_effect`: patterns of further keys."""
    for key, value in settings.items():
        if key in fixed:
            if value not in fixed[key]:
                only = " or ".join(map(json.dumps, fixed[key]))
                raise UnsupportedError(f"{section}{key} {json.dumps(value)} is not supported, only {only}")
        elif value and key not in understood and not any(fnmatchcase(key, pattern) for pattern in without_effect):
            raise UnsupportedError(
                f"{section}{key} {json.dumps(value)} is not supported; remove it if it does not change the result"
            )


def names(settings: Mapping[str, Any], key: str) -> list[str]:
    value = settings.get(key) or []
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise UnsupportedError(f"{key}: must be a list of names, not {value!r}")
    return value


def boolean(settings: Mapping[str, Any], key: str) -> bool:
    """A boolean; False if the key is absent or null."""
    value = settings.get(key)
    if value not in (None, False, True):
        raise UnsupportedError(f"{key}: must be true or false, not {value!r}")
    return bool(value)


def integer(settings: Mapping[str, Any], key: str, default: Any = None, least: int = 1) -> int:
    value = settings.get(key)
    value = default if value is None else value
    if type(value) is not int or not least <= value <= MAX_SIZE:
        raise UnsupportedError(f"{key}: must be an integer from {least} to {MAX_SIZE}, not {value!r}")
    return value


def number(settings: Mapping[str, Any], key: str, default: float | None = None, *, zero: bool = False) -> float:
    """A number above 0; with `zero`, a number of at least 0."""
    value = settings.get(key)
    value = default if value is None else value
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is None or not is_number or not 0 <= value < 1e300 or (value == 0 and not zero):
        raise UnsupportedError(f"{key}: must be a number {'of at least' if zero else 'above'} 0, not {value!r}")
    return float(value)
