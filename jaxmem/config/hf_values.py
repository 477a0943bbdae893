"""Values of a config.json or adapter_config.json. Each key is supported, known to have no effect, or refused by its
name."""

import functools
import json
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from jaxmem.config.base import Count, must_be
from jaxmem.errors import UserError
from jaxmem.machine.files import read_file
from jaxmem.typing import JsonDict, JsonView

MAX_BYTES = 16 << 20  # a limit above the size of all such files, since the content of a file is not trusted
Size = Count
Quantity = Annotated[int, Field(ge=1, le=10_000)]  # a limit on the number of layers or experts
Number = Annotated[float, Field(gt=0, lt=1e300)]


TypeForm: TypeAlias = Any  # a type that pydantic checks, also Annotated, Literal or a union


class UnsupportedError(Exception):
    """A setting is not supported, or a value has the wrong type. The caller adds the name of the file."""


def read_json(file: Path) -> JsonDict:
    """The object that a JSON file contains."""
    try:
        text = read_file(file, MAX_BYTES)
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}") from error
    try:
        settings = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file}: invalid JSON: {error}; copy the file again") from error
    if not isinstance(settings, dict):
        raise UserError(f"{file}: must contain a JSON object, not {json.dumps(settings)[:40]}; copy the file again")
    return settings


def check_keys(
    settings: JsonView,
    understood: Collection[str],
    fixed: Mapping[str, tuple[object, ...]],
    without_effect: Collection[str] = (),
    section: str = "",
) -> None:
    """Refuses a value of a `fixed` key that is not supported, and an unknown key, unless its value is null, false or
    empty. `without_effect`: patterns of keys that are ignored."""
    for key, value in settings.items():
        if key in fixed:
            if value not in fixed[key]:
                only = " or ".join(map(json.dumps, fixed[key]))
                raise UnsupportedError(f"{section}{key}={json.dumps(value)} is not supported; expected {only}")
        elif value and key not in understood and not any(fnmatchcase(key, pattern) for pattern in without_effect):
            raise UnsupportedError(
                f"{section}{key}={json.dumps(value)} is not supported; if it does not change the outputs, remove it"
            )


@functools.cache  # compiling an adapter is slow, and a search checks thousands of configs
def _adapter(kind: TypeForm) -> TypeAdapter[Any]:
    return TypeAdapter(kind, config=ConfigDict(strict=True, allow_inf_nan=False))


def read(settings: JsonView, key: str, kind: TypeForm, default: object = None) -> Any:
    """The value of a key, which pydantic checks to be of a type; the default if the key is absent or null."""
    value = settings.get(key)
    value = default if value is None else value
    checked = _adapter(kind)
    try:
        return checked.validate_python(value)
    except ValidationError as error:
        expected = must_be(error.errors())
        if key not in settings:
            raise UnsupportedError(f"{key} is missing; expected {expected}") from None
        shown = json.dumps(value)
        raise UnsupportedError(f"{key}={shown[:60]}{' ...' * (len(shown) > 60)} must be {expected}") from None
