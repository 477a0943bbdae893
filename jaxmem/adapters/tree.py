"""Trees of parameters without those of adapters."""

from __future__ import annotations

from typing import Any

NAMES = ("lora", "prompt")  # the attributes that hold adapters


def base_of(tree: Any) -> Any:
    """A nested dict of parameters, or of something for each, without adapters.

    >>> base_of({"q": {"weight": 1, "lora": {"a": 2}}})
    {'q': {'weight': 1}}
    """
    if not isinstance(tree, dict):
        return tree
    return {name: base_of(value) for name, value in tree.items() if name not in NAMES}
