"""Trees of parameters without adapters."""

from typing import Any

NAMES = ("lora", "prompt")  # the attributes that contain adapters


def base_of(tree: Any) -> Any:
    """A nested dict of parameters, or of a value for each parameter, without adapters.

    >>> base_of({"q": {"weight": 1, "lora": {"a": 2}}})
    {'q': {'weight': 1}}
    """
    if not isinstance(tree, dict):
        return tree
    return {name: base_of(value) for name, value in tree.items() if name not in NAMES}
