"""Configs of different shape, whose planned and measured peak memory scripts/bench/measure_plan.py compares."""

from typing import Any

MODELS = {
    "130m": {"family": "decoder", "vocab": 32000, "layers": 12, "embed": 768, "mlp": 2048, "heads": 12, "kv_heads": 12,
             "head_dim": 64},
    "1b": {"family": "decoder", "vocab": 128256, "layers": 16, "embed": 2048, "mlp": 8192, "heads": 32, "kv_heads": 8,
           "head_dim": 64},
}  # fmt: skip
TINY = {"vocab": 264, "layers": 2, "embed": 32, "mlp": 64, "heads": 4, "kv_heads": 2, "head_dim": 8}
BF16, SMALL_STATE = {"parameters": "bfloat16"}, {"name": "adamw8bit", "clip_by": "previous"}
LONG = {"sequence_length": 4096}
# The most different configs come first, so that little time measures many kinds of steps.
CONFIGS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("130m", {}),
    ("1b", {"memory": {"remat": "full"}}),
    ("1b", {"memory": {"remat": "full", "update": "during"}, "precision": BF16, "optimizer": SMALL_STATE}),
    ("1b", {"memory": {"remat": "full", "update": "during"}, "precision": {"parameters": "int8"},
            "optimizer": {"name": "apollo_mini", "clip_by": "previous", "project_embeddings": True}}),
    ("1b", {"memory": {"remat": "full"}, "precision": BF16 | {"master": "remainder8"},
            "optimizer": {"name": "adamw8bit"}}),
    ("1b", {"memory": {"remat": "full", "attention": "triton"}, "precision": BF16, "data": LONG}),
    ("1b", {"memory": {"remat": "full", "loss_chunk": 8192}, "precision": BF16, "batch": {"global_size": 16}}),
    ("1b", {"memory": {"remat": "dots"}, "data": {"sequence_length": 2048}, "batch": {"global_size": 2}}),
    ("130m", {"memory": {"remat": "full"}, "batch": {"global_size": 32, "accumulate": 4}}),
    ("130m", {"memory": {"remat": "sqrt"}, "batch": {"global_size": 32}}),
    ("130m", {"optimizer": {"name": "adafactor"}}),
    ("130m", {"optimizer": {"name": "galore_adamw", "rank": 192}, "memory": {"remat": "full"}}),
    ("130m", {"memory": {"remat": "dots"}}),
    ("1b", {"memory": {"remat": "full"}, "precision": BF16 | {"master": "float32"}}),
    ("130m", {"data": LONG, "batch": {"global_size": 2}, "memory": {"remat": "full", "loss_chunk": 32000}}),
    ("130m", {"precision": BF16}),
    ("130m", {"memory": {"update": "during"}}),
    ("130m", {"optimizer": {"name": "lion"}}),
    ("130m", {"memory": {"remat": "full"}, "batch": {"global_size": 32}}),
)  # fmt: skip


def configs(*, tiny: bool) -> list[dict[str, Any]]:
    """Complete configs. Their data is never read."""
    found = []
    for number, (model, changes) in enumerate(CONFIGS):
        raw: dict[str, Any] = {
            "name": f"{number:02}-{model}",
            "model": MODELS[model] | (TINY if tiny else {}),
            "data": {"source": "tokens", "path": "unused", "sequence_length": 1024},
            "batch": {"global_size": 8},
            "train": {"steps": 10},
        }
        for section, fields in changes.items():
            raw[section] = raw.get(section, {}) | fields
        if tiny:
            raw["data"]["sequence_length"] = 16
            if "loss_chunk" in raw.get("memory", {}):
                raw["memory"]["loss_chunk"] = 64
            if "rank" in raw.get("optimizer", {}):
                raw["optimizer"]["rank"] = 8
        found.append(raw)
    return found
