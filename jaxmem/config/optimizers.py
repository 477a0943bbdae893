"""Which fields each optimizer has, and what they are where nothing is given: the values of its paper."""

from __future__ import annotations

from typing import Any

ADAM: dict[str, Any] = {"beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8}
ADAMW = {**ADAM, "weight_decay": 0.1}
LION = {"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1}

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": ADAMW,
    "adam": ADAM,
    "sgd": {"momentum": 0.0, "weight_decay": 0.0},
    "lion": LION,
    "adafactor": {"weight_decay": 0.0},
    "adam_mini": ADAMW,
    "muon": {"momentum": 0.95, **ADAMW},
}

FIELDS = tuple(dict.fromkeys(field for own in OPTIMIZERS.values() for field in own))
