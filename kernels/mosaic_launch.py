"""Launching kernels written in Pallas' Mosaic GPU, which are compiled for Hopper.

`THREAD` numbers the warpgroups of a program, which synchronize by barriers. CPUs cannot compile these kernels: tests
set `EVALUATOR`, which evaluates the traced kernel."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxmem.kernels.launch import on_each_platform
from jaxmem.kernels.typing import Ref

THREAD = "mosaic_warpgroup"


def _refuse(*_: Any) -> Any:
    raise ValueError("the mosaic implementation needs a Hopper GPU; use another implementation on a CPU")


# (kernel's call, arrays, grid, warpgroups, outputs, sums) -> the function of the arrays that a CPU calls.
EVALUATOR: Callable[..., Callable[..., Any]] | None = None


@dataclass(frozen=True)
class MosaicKernel:
    """`program(*arrays, *sums, *outputs, memory)` on a grid whose first dimension is the fastest. `memory`: a tree of
    the shared memory and the barriers of a program. `flops`: as in `on_each_platform`; if there are sums, operations
    per element of the first of them."""

    name: str
    program: Callable[..., None]
    grid: Mapping[str, int]
    warpgroups: int
    memory: Ref
    flops: float = 0.0


def launch(
    kernel: MosaicKernel,
    arrays: Sequence[jax.Array],
    outputs: Sequence[jax.ShapeDtypeStruct],
    sums: Sequence[jax.ShapeDtypeStruct] = (),
) -> list[jax.Array]:
    """Returns the outputs, then `sums`, which are initialized with zeros and to which the kernel adds."""
    grid = kernel.grid
    warpgroups = kernel.warpgroups

    def body(*refs: Any) -> None:
        pl.run_scoped(lambda memory: kernel.program(*refs, memory), kernel.memory, collective_axes=THREAD)

    call = pl.kernel(
        body,
        out_type=() if sums else list(outputs),
        mesh=plgpu.Mesh(grid=tuple(grid.values()), grid_names=tuple(grid), num_threads=warpgroups, thread_name=THREAD),
        # Lowering by warpgroups, the default since jax 0.11, does not find layouts.
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        name=kernel.name,
    )

    def on_gpu(*arrays: jax.Array) -> list[jax.Array]:
        zeros = [jnp.zeros(x.shape, x.dtype) for x in sums]
        empty = [pl.empty(x.shape, x.dtype) for x in outputs] if sums else []
        if not sums:
            return list(call(*arrays))
        results = pl.run_state(lambda refs: call(*arrays, *refs))([*zeros, *empty])
        return [*results[len(sums) :], *results[: len(sums)]]

    def on_cpu(*arrays: jax.Array) -> list[jax.Array]:
        evaluate = _refuse if EVALUATOR is None else EVALUATOR(on_gpu, arrays, dict(grid), warpgroups, outputs, sums)
        return list(jax.pure_callback(evaluate, [*outputs, *sums], *arrays))

    return list(on_each_platform(kernel.name, kernel.flops, cpu=on_cpu, gpu=on_gpu)(*arrays))
