"""What the launchers of kernels share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax


def without_gradient(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, which raises where its gradient is asked for. An operation's first gradient has kernels of its own;
    higher ones are plain JAX's."""
    once = jax.custom_jvp(run)

    @once.defjvp
    def refuse(*_: Any) -> Any:
        raise ValueError(f"{name}: a kernel has no gradient of its own; implementation='reference' has")

    return once


def next_power_of_2(size: int) -> int:
    return 1 << (size - 1).bit_length()


def block_size(most: int, size: int, least: int = 16) -> int:
    """`most`, or the power of two that is enough for `size`."""
    return min(most, max(least, next_power_of_2(size)))
