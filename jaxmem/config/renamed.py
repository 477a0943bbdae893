"""Keys and values of the previous release and their new names: `load_config` accepts both for one release."""

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

KEYS = {
    "adapter.double": "double_quant",
    "adapter.faster": "lora_plus_ratio",
    "adapter.length": "virtual_tokens",
    "adapter.product": "matmul",
    "adapter.run": "base_run",
    "adapter.stabilized": "rslora",
    "cluster.heartbeat": "heartbeat_timeout",
    "data.broken": "on_invalid",
    "data.reference": "reference_logprobs",
    "data.template": "chat_template",
    "data.too_long": "on_overlong",
    "generate.cache": "kv_cache",
    "generate.chunk": "prefill_chunk",
    "optimizer.final": "min_lr_ratio",
    "optimizer.tables": "project_embeddings",
    "train.most_skipped": "max_skipped",
    "train.spike": "spike_threshold",
}
VALUES: dict[str, dict[object, object]] = {  # new key -> old value -> new value
    "checkpoint.on_failure": {"go_on": "continue"},
    "optimizer.project_embeddings": {"adam": False, "projected": True},
    "optimizer.kernel": {"pallas": "triton"},
    "adapter.matmul": {"pallas": "triton"},
    "memory.attention": {"pallas": "auto"},
    "memory.remat": {"budget": "auto"},
}


class OldNameWarning(FutureWarning):
    """A config uses names that the next release does not accept."""


def rename(raw: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The config with the new names, and a line `old -> new` for each that changed.

    >>> rename({"name": "a", "adapter": {"faster": 16}})
    ({'name': 'a', 'adapter': {'lora_plus_ratio': 16}}, ['adapter.faster -> adapter.lora_plus_ratio'])
    """
    changes: list[str] = []

    def renamed(section: str, fields: Any) -> Any:
        if not isinstance(fields, Mapping):
            return fields
        found: dict[str, Any] = {}
        for key, value in fields.items():
            new: str = KEYS.get(f"{section}.{key}") or key
            values = VALUES.get(f"{section}.{new}", {})
            found[new] = values.get(value, value) if isinstance(value, str) else value
            if new != key:
                changes.append(f"{section}.{key} -> {section}.{new}")
            elif found[new] is not value:
                changes.append(f"{section}.{key}={value} -> {str(found[new]).lower()}")
        return found

    return {section: renamed(section, fields) for section, fields in raw.items()}, changes


def warn_of(changes: Iterable[str]) -> None:
    """One warning with all old names and the new ones."""
    if lines := list(dict.fromkeys(changes)):
        text = f"renamed config keys, accepted until the next release: {', '.join(lines)}"
        warnings.warn(text, OldNameWarning, stacklevel=3)
