"""Which fields each optimizer has, and what they are where nothing is given: the values of its paper."""

from __future__ import annotations

from typing import Any

ADAM: dict[str, Any] = {"beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8}
ADAMW = {**ADAM, "weight_decay": 0.1}
GALORE = {"rank": None, "refresh_every": 200, "scale": 0.25, "project_embeddings": False}
OUTSIDE = {"residual": False}
LION = {"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1}

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": ADAMW,
    "adam": ADAM,
    "sgd": {"momentum": 0.0, "weight_decay": 0.0},
    "lion": LION,
    "adafactor": {"weight_decay": 0.0},
    "adam_mini": ADAMW,
    "muon": {"momentum": 0.95, **ADAMW},
    "adamw8bit": ADAMW,
    "adamw4bit": ADAMW,
    "lion8bit": LION,
    "momentum8bit": {"momentum": 0.9, "weight_decay": 0.0},
    "galore_adamw": {**GALORE, **OUTSIDE, **ADAMW},
    "galore_adamw8bit": {**GALORE, **OUTSIDE, **ADAMW},
    "qgalore": {**GALORE, **OUTSIDE, "similarity": 0.4, **ADAMW},
    "apollo": {**GALORE, "scale": 1.0, **ADAMW},
    "apollo_mini": {"refresh_every": 200, "scale": 128.0, "project_embeddings": False, **ADAMW},
}

FIELDS = tuple(dict.fromkeys(field for own in OPTIMIZERS.values() for field in own))
