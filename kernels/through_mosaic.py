"""Calling kernels written for Pallas' Mosaic GPU: compiled for Hopper, evaluated on a CPU, for tests.

The warpgroups of a program, which `THREAD` numbers, talk through barriers. What jax traces of a kernel is what Mosaic
compiles, and also what `warpgroups.py` evaluates.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.xla_metadata import set_xla_metadata

from jaxmem.kernels.launch import without_gradient
from jaxmem.kernels.warpgroups import THREAD, evaluated


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
    which begin as zeros and are added to. `flops` as in `launch.launch`, of the first of `sums`, if there are any. XLA
    cannot batch it: under `jax.vmap` it runs once for each."""

    def body(*refs: Any) -> None:
        pl.run_scoped(lambda **held: kernel(*refs, **held), collective_axes=THREAD, **scratch)

    call = pl.kernel(
        body,
        out_type=() if sums else list(outputs),
        mesh=plgpu.Mesh(grid=tuple(grid.values()), grid_names=tuple(grid), num_threads=warpgroups, thread_name=THREAD),
        # By lanes: by warpgroups, as is usual since jax 0.11, it looks for layouts and does not find them.
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        name=name,
    )

    def on_gpu(*arrays: jax.Array) -> list[jax.Array]:
        begun = [jnp.zeros(x.shape, x.dtype) for x in sums]
        empty = [pl.empty(x.shape, x.dtype) for x in outputs] if sums else []
        with set_xla_metadata(flops_per_output=str(flops)):
            if not sums:
                return list(call(*arrays))
            made = pl.run_state(lambda refs: call(*arrays, *refs))([*begun, *empty])
        return [*made[len(sums) :], *made[: len(sums)]]

    def here(*arrays: jax.Array) -> list[jax.Array]:
        made = [*outputs, *sums]
        evaluate = functools.partial(evaluated, _traced(on_gpu, arrays), dict(grid), warpgroups, outputs, sums)
        with set_xla_metadata(flops_per_output=str(flops)):
            return list(jax.pure_callback(evaluate, made, *arrays))

    @jax.custom_batching.sequential_vmap
    def run(*arrays: jax.Array) -> list[jax.Array]:
        return jax.lax.platform_dependent(*arrays, cpu=here, default=on_gpu)

    return list(without_gradient(name, run)(*arrays))


def _traced(call: Callable[..., Any], arrays: Sequence[jax.Array]) -> Any:
    """What jax traces of a kernel: a function on references."""
    (found,) = _kernels(jax.make_jaxpr(call)(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays)).jaxpr)
    return found


def _kernels(jaxpr: Any) -> list[Any]:
    found: list[Any] = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "mpmd_map":
            found += eqn.params["jaxprs"]
        for inner in ("call", "jaxpr"):
            if inner in eqn.params:
                found += _kernels(getattr(eqn.params[inner], "jaxpr", eqn.params[inner]))
    return found
