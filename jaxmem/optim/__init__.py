"""Optimizers: plain optax transformations that work in any training loop, and the chain that a config names.

AdamW in float32 stores two moments per parameter: with the weight and the gradient, 16 bytes per parameter. The other
optimizers store less; each module documents its memory and cost. A module is imported when one of its names is first
used.
"""

import importlib
from typing import Any

from jaxmem.config.optimizers import OPTIMIZERS

_MODULES = {
    "rules.adafactor": ("scale_by_adafactor",),
    "rules.adam_mini": ("scale_by_adam_mini",),
    "rules.apollo": ("scale_by_apollo", "scale_by_apollo_mini"),
    "apply": ("apply_updates", "global_norm", "leaf_key"),
    "layers": ("MatrixRule", "ParameterSpec", "UpdateContext", "by_layer"),
    "clipping": ("clip", "record_norm"),
    "rules.galore": ("scale_by_galore", "scale_by_galore8bit", "scale_by_qgalore"),
    "master": ("REMAINDER_BITS", "with_master", "with_remainder"),
    "rules.muon": ("scale_by_muon",),
    "rules.quantized": ("scale_by_adam4bit", "scale_by_adam8bit", "scale_by_lion8bit", "trace8bit"),
    "registry": ("build", "optimizer"),
    "learning_rate": ("schedule",),
    "selection": ("Selection", "scale_updates", "select_trainable", "trainable"),
}
_NAMES = {name: module for module, names in _MODULES.items() for name in names}
__all__ = sorted({*_NAMES, *OPTIMIZERS})  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    """Returns a function of the modules above, or an optimizer of the registry: `optim.adamw(1e-3)`."""
    if name in OPTIMIZERS:
        return importlib.import_module("jaxmem.optim.registry").optimizer(name)
    if name in _NAMES:
        return getattr(importlib.import_module(f"jaxmem.optim.{_NAMES[name]}"), name)
    raise AttributeError(f"module 'jaxmem.optim' has no attribute {name!r}")
