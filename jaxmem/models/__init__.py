"""Networks as Flax NNX modules, built from one set of layers. They declare parameters and logical axes, not devices."""

from __future__ import annotations

from importlib import import_module
from typing import Any

# The module and class of each model family. Config sections are in config/networks.py, and the names of weights in
# Hugging Face directories in hf/names.py.
FAMILIES = {
    "decoder": ("jaxmem.models.decoder", "Decoder"),
    "vit": ("jaxmem.models.vit", "Vit"),
    "convnet": ("jaxmem.models.convnet", "Convnet"),
    "mlp": ("jaxmem.models.mlp", "Mlp"),
}
_NAMES = {name: module for module, name in FAMILIES.values()} | {
    "Chunking": "jaxmem.models.chunking",
    "Execution": "jaxmem.models.network",
    "Network": "jaxmem.models.network",
}
__all__ = ["FAMILIES", "Chunking", "Convnet", "Decoder", "Execution", "Mlp", "Network", "Vit", "build"]


def build(cfg: Any, rngs: Any, execution: Any = None) -> Any:
    """Returns the network of the config section `model`. Only the module of its family is imported."""
    module, name = FAMILIES[cfg.family]
    network = getattr(import_module(module), name)
    return network(cfg, rngs) if execution is None else network(cfg, rngs, execution)


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_NAMES[name]), name)
