"""Hugging Face directories: their weights in, and out again. safetensors only; nothing is unpickled, no code is run.

model = load("llama-3.2-1b", dtype=jnp.bfloat16)     # a network, its weights sharded by a layout
save(model, "mine")                                  # a directory that transformers opens

`model.hf: DIR` in a config does the first for a run, `jaxmem export` the second.
"""

import importlib
from typing import Any

# Imported when first used.
_MODULES = {
    "check_adapter": "adapter_base",
    "copy_metadata": "files",
    "fingerprint": "adapter_base",
    "load": "reader",
    "read_adapter": "peft",
    "read_weights": "reader",
    "save": "writer",
    "save_adapter": "peft",
    "storage_dtype": "files",
}
__all__ = sorted(_MODULES)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
