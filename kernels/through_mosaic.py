"""Calling kernels written for Pallas' Mosaic GPU: compiled for Hopper, evaluated on a CPU, for tests.

The warpgroups of a program, which `THREAD` numbers, talk through barriers. What jax traces of a kernel is what Mosaic
compiles, and also what `warpgroups.py` evaluates.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.xla_metadata import set_xla_metadata

from jaxmem.kernels.warpgroups import THREAD, evaluated


def launch(
    name: str,
    kernel: Callable[..., None],
    arrays: Sequence[jax.Array],
    outputs: Sequence[jax.ShapeDtypeStruct],
    *,
    grid: Mapping[str, int],
    warpgroups: int,
    scratch: Mapping[str, Any],
    flops: float = 0.0,
) -> list[jax.Array]:
    """`kernel(*arrays, *outputs, **scratch)` on a grid, its first dimension the fastest; `flops` as in
    `launch.launch`. XLA cannot batch it: under `jax.vmap` it runs once for each."""

    def body(*refs: Any, **held: Any) -> None:
        kernel(*refs, **held)

    body.__name__ = name
    call = plgpu.kernel(
        body,
        out_type=list(outputs),
        scratch_types=dict(scratch),
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=warpgroups,
        thread_name=THREAD,
        # By lanes: by warpgroups, as is usual since jax 0.11, it looks for layouts and does not find them.
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
    )

    def here(*arrays: jax.Array) -> list[jax.Array]:
        evaluate = functools.partial(evaluated, _traced(call, arrays), dict(grid), warpgroups, tuple(outputs))
        return list(jax.pure_callback(evaluate, list(outputs), *arrays))

    @jax.custom_batching.sequential_vmap
    def run(*arrays: jax.Array) -> list[jax.Array]:
        with set_xla_metadata(flops_per_output=str(flops)):
            return jax.lax.platform_dependent(*arrays, cpu=here, default=lambda *arrays: list(call(*arrays)))

    return list(run(*arrays))


def _traced(call: Callable[..., Any], arrays: Sequence[jax.Array]) -> Any:
    """What jax traces of a kernel: a function on references."""
    (found,) = _kernels(jax.make_jaxpr(call)(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays)).jaxpr)
    return found


def _kernels(jaxpr: Any) -> list[Any]:
    found: list[Any] = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "mpmd_map":
            found += eqn.params["jaxprs"]
        elif "call" in eqn.params:
            found += _kernels(eqn.params["call"].jaxpr)
    return found
