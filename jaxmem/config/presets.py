"""The decoders that `model.preset` names: the fields of `model` of each, from `presets.yaml`."""

import re
from typing import NoReturn

from jaxmem.config.base import read_table
from jaxmem.errors import UserError, nearest
from jaxmem.typing import JsonDict

_TABLE = read_table("presets")


def _fields(shape: list[int], **others: object) -> JsonDict:
    return {**dict(zip(_TABLE["shape"], shape, strict=True)), **others}


PRESETS: dict[str, JsonDict] = {name: _fields(**preset) for name, preset in _TABLE["presets"].items()}

# Parts of names on the hub that do not change the shape of a model.
_SUFFIXES = re.compile(r"(?:^|[-_])(?:meta|base|instruct|chat|it|hf|v0\.1)(?=[-_]|$)")


def _plain(name: str) -> str:
    """The name with separators only between digits: qwen2-57b is not qwen2.5-7b."""
    joined = re.sub(r"(?<!\d)[-_.]|[-_.](?!\d)", "", _SUFFIXES.sub("", name.lower()))
    return re.sub(r"[_.]", "-", joined)


_BY_PLAIN_NAME = {_plain(name): name for name in PRESETS}
_BY_PLAIN_NAME |= {_plain(name): preset for name, preset in _TABLE["aliases"].items()}


def preset_of(name: str) -> str | None:
    """The preset of a name, which may have the spelling of the Hugging Face Hub; None: it names no preset.

    >>> preset_of("Llama-3.1-8B-Instruct"), preset_of("Qwen3-VL-8B"), preset_of("Qwen2-57B")
    ('llama3.1-8b', None, None)
    """
    return name if name in PRESETS else _BY_PLAIN_NAME.get(_plain(name))


def refuse_preset(name: str, problem: str) -> NoReturn:
    """Raises an error for a name that is no preset, with the nearest one; a known model is called not supported."""
    for model, similar in _TABLE["unsupported"].items():
        if _plain(name).startswith(_plain(model)):
            raise UserError(f"{name}: the architecture of {model} is not supported; the nearest preset is {similar}")
    raise UserError(f"{problem}{nearest(name.lower(), PRESETS)}")
