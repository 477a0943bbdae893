"""The maximum over a sliding window as two Triton kernels: one that reads its numbers from global memory, and one
that copies them to the multiprocessor first.

`straight`: each thread reads its window's w numbers from global memory: 4 w bytes requested per result, which
caches serve mostly.

`shared`: a program makes OUTPUTS results from the OUTPUTS + w - 1 numbers that they need and reads each of those once:
4 (1 + (w - 1) / OUTPUTS) bytes per result. Between the threads they go through shared memory. The comparisons stay n w:
what changes is where the numbers come from.
"""

from dataclasses import dataclass

import jax
from jaxtyping import Array, Float

from jaxmem.kernels.triton_launch import launch, load_programs

OUTPUTS = 512  # results of a program
STRIP = 16  # numbers that are compared with all of its results at once


@dataclass(frozen=True)
class Static:
    """What a program knows at compile time."""

    numbers: int
    window: int
    outputs: int = OUTPUTS
    strip: int = STRIP


def maximum(x: Float[Array, "numbers"], window: int, *, kind: str) -> Float[Array, "windows"]:
    """Computed by the program `kind`."""
    count = x.shape[0] - window + 1
    (found,) = launch(
        getattr(load_programs("jaxmem.lab.sliding_max.triton_programs"), f"sliding_max_{kind}"),
        [x],
        [jax.ShapeDtypeStruct((count,), x.dtype)],
        grid=(-(-count // OUTPUTS),),
        static=Static(x.shape[0], window),
        warps=4,
        stages=2,
    )
    return found


def requested_bytes(kind: str, numbers: int, window: int) -> float:
    """Bytes of global memory, with the results."""
    results = numbers - window + 1
    read = window if kind == "straight" else 1 + (window - 1) / OUTPUTS
    return 4.0 * results * (read + 1)
