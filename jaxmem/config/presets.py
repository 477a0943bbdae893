"""The decoders that `model.preset` names: the fields of `model` of each, from `presets.yaml`."""

from typing import Any

from jaxmem.config.tables import read_table

_TABLE = read_table("presets")


def _fields(shape: list[int], **others: Any) -> dict[str, Any]:
    return {**dict(zip(_TABLE["shape"], shape, strict=True)), **others}


PRESETS: dict[str, dict[str, Any]] = {name: _fields(**preset) for name, preset in _TABLE["presets"].items()}
