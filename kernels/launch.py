"""Common parts of the launchers of kernels."""

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.xla_metadata import set_xla_metadata


def on_each_platform(
    name: str, flops: float, *, cpu: Callable[..., Any], gpu: Callable[..., Any]
) -> Callable[..., Any]:
    """A kernel as a function of arrays. `flops`: operations per element of its first output, which the compiled program
    carries as metadata. XLA cannot batch a kernel, so under `jax.vmap` it runs once per element. Its gradient raises an
    error: operations have separate kernels for first gradients, and support higher gradients in plain JAX only."""

    @jax.custom_batching.sequential_vmap
    def run(*arrays: jax.Array) -> Any:
        with set_xla_metadata(flops_per_output=str(flops)):
            return jax.lax.platform_dependent(*arrays, cpu=cpu, default=gpu)

    once = jax.custom_jvp(run)

    @once.defjvp
    def refuse(*_: Any) -> Any:
        raise ValueError(f"{name}: a kernel has no gradient; use implementation='reference'")

    return once


def next_power_of_2(size: int) -> int:
    return 1 << (size - 1).bit_length()


def block_size(most: int, size: int) -> int:
    """`most`, or the next power of two of `size` if that is smaller; at least 16, for the tensor cores."""
    return min(most, max(16, next_power_of_2(size)))
