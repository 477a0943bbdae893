"""What the launchers of kernels share."""

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.xla_metadata import set_xla_metadata


def on_each_platform(
    name: str, flops: float, *, cpu: Callable[..., Any], gpu: Callable[..., Any]
) -> Callable[..., Any]:
    """A kernel, as a function of arrays. `flops`: per number of its first output, which the compiled program carries as
    metadata. XLA cannot batch it: under `jax.vmap` it runs once for each element. It raises where its gradient is asked
    for: an operation's first gradient has kernels of its own; higher ones are plain JAX's."""

    @jax.custom_batching.sequential_vmap
    def run(*arrays: jax.Array) -> Any:
        with set_xla_metadata(flops_per_output=str(flops)):
            return jax.lax.platform_dependent(*arrays, cpu=cpu, default=gpu)

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
