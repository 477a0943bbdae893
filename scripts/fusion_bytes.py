"""What XLA makes by itself of norms, gates and rotations: the bytes that its kernels read and write, in the compiled
module of a GPU that need not be here, beside the least that any kernel could. The table of docs/kernels.md.

    python scripts/fusion_bytes.py [TARGET]        # half a minute

8,192 tokens of Llama 3 8B in bfloat16. `with backward`: both passes, as where a layer is made again for its gradient.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from jaxmem import devices

devices.stay_on_cpu_without_gpu(only_compile=True)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax.sharding import SingleDeviceSharding  # noqa: E402

from jaxmem.kernels import rms_norm  # noqa: E402
from jaxmem.models.rope import Angles, rotate  # noqa: E402
from jaxmem.planning.compile import compile_all  # noqa: E402
from jaxmem.planning.targets import parse_target, target_devices  # noqa: E402
from jaxmem.planning.timeline import moved_bytes  # noqa: E402

TOKENS, EMBED, MLP, HEADS, DIM = 8192, 4096, 14336, 32, 128
WIDE = (TOKENS, EMBED)
NO_KERNELS = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast")


def norm(x: jax.Array, branch: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A branch added to the residual stream, and the norm of the sum, as a block has it."""
    return rms_norm(x, scale, residual=branch, implementation="reference")


def in_a_kernel(x: jax.Array, branch: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    return rms_norm(x, scale, residual=branch, implementation="pallas")


def gate(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.silu(gate) * up


def operations() -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...], tuple[int, ...]]]:
    """With the arguments that have a gradient of their own: that of a branch is that of the stream."""

    def numbers(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    angles = Angles(*(numbers(1, TOKENS, DIM // 2, dtype=jnp.float32),) * 2)
    scale = numbers(EMBED, dtype=jnp.float32)
    yield "rms_norm, with the residual", norm, (numbers(*WIDE), numbers(*WIDE), scale), (0, 2)
    yield "the same, in a kernel", in_a_kernel, (numbers(*WIDE), numbers(*WIDE), scale), (0, 2)
    yield "swiglu", gate, (numbers(TOKENS, MLP), numbers(TOKENS, MLP)), (0, 1)
    yield "rope", rotate, (numbers(1, TOKENS, HEADS, DIM), angles), (0,)


def counted(function: Callable[..., Any], arguments: Any, device: Any) -> tuple[int, int, int]:
    """Bytes that XLA's kernels move, the least, and how many kernels there are."""
    place = SingleDeviceSharding(device)
    placed = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), arguments)
    lowered = jax.jit(function).lower(*placed)
    module = compile_all(lowered, {}, here=False)[0].module
    kernels = [moved_bytes(one) for one in module.entry.instructions if one.opcode not in NO_KERNELS]
    read = sum(one.shape.bytes for one in module.entry.instructions if one.opcode == "parameter")
    written = sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(jax.eval_shape(function, *arguments)))
    least = read + written
    return sum(kernels), least, len(kernels)


def main(target: str = "h100-80gb") -> None:
    device = target_devices(parse_target(target), 8 * 2**30)[0]
    print("| | pass | kernels | MB moved | least | |\n| --- | --- | ---: | ---: | ---: | ---: |")
    for name, function, arguments, own in operations():
        made = jax.eval_shape(function, *arguments)

        def both(function: Any, own: Any, arguments: Any, cotangents: Any) -> Any:
            def of_own(*chosen: Any) -> Any:
                given = dict(zip(own, chosen, strict=True))
                return function(*(given.get(i, x) for i, x in enumerate(arguments)))

            made, pull = jax.vjp(of_own, *(arguments[i] for i in own))
            return made, pull(cotangents)

        back = partial(both, function, own)
        for of, run, given in (("forward", function, arguments), ("with backward", back, (arguments, made))):
            moved, least, kernels = counted(run, given, device)
            print(f"| {name} | {of} | {kernels} | {moved / 1e6:.0f} | {least / 1e6:.0f} | {moved / least:.2f} x |")


if __name__ == "__main__":
    main(*sys.argv[1:])
