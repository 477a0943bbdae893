"""Launching kernels written for Pallas' Mosaic GPU, compiled for Hopper.

The warpgroups of a program, which `THREAD` numbers, talk through barriers. On a CPU nothing compiles them: tests put an
evaluator of what jax traces in `EVALUATOR`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxmem.kernels.launch import on_each_platform

THREAD = "mosaic_warpgroup"


def _without_evaluator(*_: Any) -> Callable[..., Any]:
    def refuse(*_: Any) -> Any:
        raise ValueError("the mosaic implementation needs a Hopper GPU; use another one on a CPU")

    return refuse


# (kernel's call, arrays, grid, warpgroups, outputs, sums) -> what a CPU calls on the arrays: gives outputs and sums.
EVALUATOR: Callable[..., Callable[..., Any]] = _without_evaluator


def launch(
    name: str,
    kernel: Callable[..., None],
    arrays: Sequence[jax.Array],
    outputs: Sequence[jax.ShapeDtypeStruct],
    *,
    sums: Sequence[jax.ShapeDtypeStruct] = (),
    grid: Mapping[str, int],
    warpgroups: int,
    scratch: Mapping[str, Any],
    flops: float = 0.0,
) -> list[jax.Array]:
    """`kernel(*arrays, *sums, *outputs, **scratch)` on a grid, its first dimension the fastest: outputs, then `sums`,
    which begin as zeros and are added to. `flops`: as in `on_each_platform`, of the first of `sums`, if there are
    any."""

    def body(*refs: Any) -> None:
        pl.run_scoped(lambda **allocated: kernel(*refs, **allocated), collective_axes=THREAD, **scratch)

    call = pl.kernel(
        body,
        out_type=() if sums else list(outputs),
        mesh=plgpu.Mesh(grid=tuple(grid.values()), grid_names=tuple(grid), num_threads=warpgroups, thread_name=THREAD),
        # By warpgroups, the default since jax 0.11, it does not find layouts.
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        name=name,
    )

    def on_gpu(*arrays: jax.Array) -> list[jax.Array]:
        zeros = [jnp.zeros(x.shape, x.dtype) for x in sums]
        empty = [pl.empty(x.shape, x.dtype) for x in outputs] if sums else []
        if not sums:
            return list(call(*arrays))
        made = pl.run_state(lambda refs: call(*arrays, *refs))([*zeros, *empty])
        return [*made[len(sums) :], *made[: len(sums)]]

    def on_cpu(*arrays: jax.Array) -> list[jax.Array]:
        evaluate = EVALUATOR(on_gpu, arrays, dict(grid), warpgroups, outputs, sums)
        return list(jax.pure_callback(evaluate, [*outputs, *sums], *arrays))

    return list(on_each_platform(name, flops, cpu=on_cpu, gpu=on_gpu)(*arrays))
