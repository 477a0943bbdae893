"""The maximum over a sliding window as two Pallas kernels, compiled by Triton: one that reads what it needs from
memory, and one that brings it to the multiprocessor first.

`straight`: each thread reads its window's w numbers from global memory: 4 w bytes asked for a result, of which the
caches answer most.

`shared`: a program makes OUTPUTS results from the OUTPUTS + w - 1 numbers that they need and brings each of those
once: 4 (1 + (w - 1) / OUTPUTS) bytes a result. Between the threads they go through shared memory, which is where
Triton lays an array that is spread along a new dimension. The comparisons stay n w: what changes is where the numbers
come from.

Compared are whole numbers that stand in the order of the floats whose bits they are, with NaN above all of them: the
larger of NaN and a number is, to a GPU, the number.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float

from jaxmem.kernels.launch import launch

OUTPUTS = 512  # results of a program
STRIP = 16  # numbers that are compared with all of its results at once
LEAST = -(2**31)  # in the order of floats before -inf


def straight(x: Float[Array, "numbers"], window: int) -> Float[Array, "windows"]:
    return _run("sliding_max_straight", _straight, x, window)


def shared(x: Float[Array, "numbers"], window: int) -> Float[Array, "windows"]:
    return _run("sliding_max_shared", _shared, x, window)


def bytes_asked(kind: str, numbers: int, window: int) -> float:
    """Of global memory, results written among them."""
    results = numbers - window + 1
    read = window if kind == "straight" else 1 + (window - 1) / OUTPUTS
    return 4.0 * results * (read + 1)


def _run(name: str, kernel: Any, x: jax.Array, window: int) -> jax.Array:
    count = x.shape[0] - window + 1
    (made,) = launch(
        name,
        functools.partial(kernel, x.shape[0], window),
        (x,),
        grid=(pl.cdiv(count, OUTPUTS),),
        in_specs=[pl.BlockSpec(x.shape, lambda _: (0,))],
        out_specs=[pl.BlockSpec((OUTPUTS,), lambda i: (i,))],
        out_shape=[jax.ShapeDtypeStruct((count,), x.dtype)],
        warps=4,
        stages=2,
    )
    return made


def _straight(numbers: int, window: int, x_ref: Any, out_ref: Any) -> None:
    first = pl.program_id(0) * OUTPUTS
    place = first + jnp.arange(OUTPUTS, dtype=jnp.int32)

    def step(k: jax.Array, most: jax.Array) -> jax.Array:
        here = plgpu.load(x_ref.at[pl.ds(first + k, OUTPUTS)], mask=place + k < numbers, other=-jnp.inf)
        return jnp.maximum(most, _in_order(here))

    most = jax.lax.fori_loop(0, window, step, jnp.full((OUTPUTS,), LEAST, jnp.int32))
    plgpu.store(out_ref, _as_number(most), mask=place <= numbers - window)


def _shared(numbers: int, window: int, x_ref: Any, out_ref: Any) -> None:
    first = pl.program_id(0) * OUTPUTS
    place = first + jnp.arange(OUTPUTS, dtype=jnp.int32)

    def step(t: jax.Array, most: jax.Array) -> jax.Array:
        at = first + t * STRIP + jnp.arange(STRIP, dtype=jnp.int32)
        strip = plgpu.load(x_ref.at[pl.ds(first + t * STRIP, STRIP)], mask=at < numbers, other=-jnp.inf)
        distance = at[None, :] - place[:, None]
        inside = (distance >= 0) & (distance < window)
        return jnp.maximum(most, jnp.max(jnp.where(inside, _in_order(strip)[None, :], LEAST), axis=1))

    strips = pl.cdiv(OUTPUTS + window - 1, STRIP)
    most = jax.lax.fori_loop(0, strips, step, jnp.full((OUTPUTS,), LEAST, jnp.int32))
    plgpu.store(out_ref, _as_number(most), mask=place <= numbers - window)


def _in_order(x: jax.Array) -> jax.Array:
    bits = jax.lax.bitcast_convert_type(jnp.where(x != x, jnp.float32(jnp.nan), x), jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _as_number(order: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(jnp.where(order < 0, order ^ 0x7FFFFFFF, order), jnp.float32)
