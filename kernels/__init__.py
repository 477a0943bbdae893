"""Operations on plain arrays, for any program with jax; they import nothing of jaxmem outside of `jaxmem.kernels`.

Each operation has a folder with its implementations and the checks of their arguments. `reference.py` defines the
results; those of `grouped_matmul`, which is imported from its folder, are defined by `map_groups`. An operation is
imported at its first use, an implementation at its first call."""

import importlib
from typing import Any

_MODULES = {
    "AdamHyperparameters": "quantized_update",
    "Moments8": "quantized_update",
    "adam8_update": "quantized_update",
    "attention": "fused_attention",
    "int8_add": "quantized_update",
}
__all__ = sorted(_MODULES)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value
