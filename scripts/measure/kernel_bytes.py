"""Bytes that an operation moves on a GPU that need not be here, by implementation, read from the compiled module: what
a kernel would save a run. The table of docs/kernels.md.

    python scripts/measure/kernel_bytes.py [TARGET]        # half a minute
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from jaxmem.machine import devices

devices.stay_on_cpu_without_gpu(only_compile=True)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

from jaxmem.kernels import cross_entropy, int8_add  # noqa: E402
from jaxmem.lab.tour.fusion import counted  # noqa: E402
from jaxmem.planning.targets import parse_target, target_devices  # noqa: E402

TOKENS, EMBED, VOCAB, MLP = 8192, 4096, 128256, 14336  # Llama 3 8B


def operations() -> Iterator[tuple[str, str, Callable[..., Any], tuple[Any, ...]]]:
    numbers = jax.ShapeDtypeStruct
    loss = numbers((TOKENS, EMBED), jnp.bfloat16), numbers((EMBED, VOCAB), jnp.bfloat16), numbers((TOKENS,), jnp.int32)
    for way in ("sliced", "pallas"):
        forward = partial(cross_entropy, implementation=way)
        yield "cross_entropy, forward", way, forward, loss
        yield "cross_entropy, with backward", way, jax.grad(partial(_sum, forward), (0, 1)), loss
    codes, scale = numbers((EMBED, MLP), jnp.int8), numbers((EMBED // 256, MLP), jnp.float32)
    update = codes, scale, numbers((EMBED, MLP), jnp.bfloat16), numbers(scale.shape, jnp.uint32)
    for way in ("reference", "pallas"):
        yield "int8_add", way, partial(int8_add, implementation=way), update


def _sum(forward: Callable[..., Any], x: Any, weight: Any, labels: Any) -> Any:
    return jnp.sum(forward(x, weight, labels))


def main(target: str = "h100-80gb") -> None:
    device = target_devices(parse_target(target), 60 * 2**30)[0]
    print("| | implementation | kernels | MB moved | least |\n| --- | --- | ---: | ---: | ---: |")
    for name, way, run, arguments in operations():
        found = counted(run, arguments, device)
        print(f"| {name} | {way} | {found['kernels']} | {found['moved'] / 1e6:.0f} | {found['least'] / 1e6:.0f} |")


if __name__ == "__main__":
    main(*sys.argv[1:])
