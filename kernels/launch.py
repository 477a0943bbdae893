"""Calling Pallas' kernels: compiled by Triton for a GPU, interpreted on a CPU, and saying what they compute."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.experimental.xla_metadata import set_xla_metadata

from .instructions import written


def launch(
    name: str,
    kernel: Callable[..., None],
    arrays: Sequence[jax.Array],
    *,
    grid: tuple[int, ...],
    in_specs: Sequence[pl.BlockSpec],
    out_specs: Sequence[pl.BlockSpec],
    out_shape: Sequence[jax.ShapeDtypeStruct],
    warps: int,
    stages: int,
    flops: float = 0.0,
    in_place: Mapping[int, int] | None = None,
) -> Any:
    """`kernel(*inputs, *outputs)` on a grid. `flops`: for each number of the first output, what a compiled program says
    of this kernel. `in_place`: which input's memory which output takes."""

    def call(interpret: bool) -> Callable[..., Any]:
        def traced(*refs: Any) -> None:
            with written(not interpret):
                kernel(*refs)

        return pl.pallas_call(
            traced,
            grid=grid,
            in_specs=list(in_specs),
            out_specs=list(out_specs),
            out_shape=list(out_shape),
            input_output_aliases=dict(in_place or {}),
            compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=stages),
            interpret=interpret,
            name=name,
        )

    def run(*arrays: jax.Array) -> Any:
        with set_xla_metadata(flops_per_output=str(flops)):
            return jax.lax.platform_dependent(*arrays, cpu=call(interpret=True), default=call(interpret=False))

    return without_gradient(name, run)(*arrays)


def without_gradient(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel, which says so where its gradient is asked for: an operation has the first, by kernels of its own, and
    in plain JAX also those of gradients."""
    once = jax.custom_jvp(run)

    @once.defjvp
    def refused(*_: Any) -> Any:
        raise ValueError(f"{name}: a kernel has no gradient of its own; implementation='reference' has")

    return once


def up_to(most: int, size: int, least: int = 16) -> int:
    """A block of `most`, or the power of two that is enough."""
    return min(most, max(least, pl.next_power_of_2(size)))
