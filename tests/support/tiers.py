"""The two tiers of tests: `make test` deselects those marked `exhaustive`, `make test-all` runs both."""

from collections.abc import Iterable
from typing import Any

import pytest


def exhaustive(*values: Any) -> Any:
    """Parameters of one test that only `make test-all` runs."""
    return pytest.param(*values, marks=pytest.mark.exhaustive)


def cases(values: Iterable[Any], *fast: Any) -> list[Any]:
    """Parameters of a test, a tuple where it has several, of which `make test` runs the `fast` ones."""
    values = list(values)
    if unknown := [value for value in fast if value not in values]:
        raise ValueError(f"no such case: {unknown}; known: {values}")
    return [
        value if value in fast else exhaustive(*(value if isinstance(value, tuple) else (value,))) for value in values
    ]
