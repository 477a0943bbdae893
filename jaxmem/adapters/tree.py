"""A model's parameters in two: its own, and those of adapters."""

from __future__ import annotations

from typing import Any

NAMES = ("lora", "prompt")  # the attributes that hold adapters


def owns(path: tuple[Any, ...]) -> bool:
    """Whether the parameter at a path, of names, is an adapter's."""
    return any(name in NAMES for name in path)


def base_of(tree: Any) -> Any:
    """A tree of parameters, or what has its form, without adapters.

    >>> base_of({"q": {"weight": 1, "lora": {"a": 2}}})
    {'q': {'weight': 1}}
    """
    if not isinstance(tree, dict):
        return tree
    return {name: base_of(value) for name, value in tree.items() if name not in NAMES}
