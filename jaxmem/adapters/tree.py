"""A model's parameters in two: its own, and those of adapters."""

from __future__ import annotations

from typing import Any

NAMES = ("lora",)  # the attributes that hold adapters


def base_of(tree: Any) -> Any:
    """A tree of parameters, or what has its form, without adapters.

    >>> base_of({"q": {"weight": 1, "lora": {"a": 2}}})
    {'q': {'weight': 1}}
    """
    if not isinstance(tree, dict):
        return tree
    return {name: base_of(value) for name, value in tree.items() if name not in NAMES}


def joined(base: Any, whole: Any) -> Any:
    """`whole` with the base's own parameters in the place of its.

    >>> joined({"q": {"weight": 3}}, {"q": {"weight": 1, "lora": {"a": 2}}})
    {'q': {'weight': 3, 'lora': {'a': 2}}}
    """
    if not isinstance(whole, dict):
        return base
    return {name: value if name in NAMES else joined(base[name], value) for name, value in whole.items()}
