"""The norm as Pallas kernels, compiled by Triton: a row lies in registers between its mean and its division.

Forward each array is read once and written once: the sum with the residual comes of the same pass. Backward the row
is normalised anew from the sum, which is there; the gradient of the scale is added up over the rows of a program, and
those of all programs after the kernel, in float32 and always in the same order.

On a CPU the same kernels run interpreted, for tests.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float

from jaxmem.kernels import tuning
from jaxmem.kernels.launch import launch

from .reference import Rows


class Share(NamedTuple):
    """What a program has."""

    numbers: int  # of a tile, at least a row
    warps: int
    programs: int  # backward, at most: as many rows of partial sums


USUAL = Share(4096, 8, 512)
MOST = 65536  # numbers of a row
HELD = {"forward": 3, "backward": 6}  # registers for each number of a thread


def normed(
    epsilon: float, x: Rows, residual: Rows | None, scale: Float[Array, "size"]
) -> tuple[Float[Array, "rows size"], Float[Array, "rows size"]]:
    """The norm of the sum, and the sum."""
    if x.shape[1] > MOST:
        raise ValueError(f"rms_norm: x has rows of {x.shape[1]}; the pallas implementation takes {MOST} at most")
    return _normed(epsilon, x, residual, scale)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _normed(epsilon: float, x: Any, residual: Any, scale: Any) -> tuple[jax.Array, jax.Array]:
    return _forward(epsilon, x, residual, scale)[0]


def _forward(epsilon: float, x: Any, residual: Any, scale: Any) -> tuple[tuple[jax.Array, jax.Array], Any]:
    rows, size = x.shape
    share, wide = _share("forward", x), pl.next_power_of_2(size)
    several = max(1, share.numbers // wide)
    tile = pl.BlockSpec((several, wide), lambda i: (i, 0))
    given = (x,) if residual is None else (x, residual)
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    normal, *summed = launch(
        "rms_norm",
        functools.partial(_norm, epsilon, (rows, size)),
        (scale, *given),
        grid=(pl.cdiv(rows, several),),
        in_specs=[pl.BlockSpec((wide,), lambda _: (0,)), *[tile] * len(given)],
        out_specs=[tile] * len(given),
        out_shape=[shape] * len(given),
        warps=share.warps,
        stages=1,
    )
    total = summed[0] if summed else x
    return (normal, total), (total, scale, residual is None)


def _backward(epsilon: float, kept: Any, cotangents: tuple[jax.Array, jax.Array]) -> tuple[Any, ...]:
    summed, scale, alone = kept
    rows, size = summed.shape
    share, wide = _share("backward", summed), pl.next_power_of_2(size)
    several = max(1, share.numbers // wide)
    tiles = pl.cdiv(pl.cdiv(rows, several), share.programs)  # of a program
    programs = pl.cdiv(rows, several * tiles)
    part = pl.BlockSpec((several * tiles, wide), lambda i: (i, 0))
    of_x, of_scale = launch(
        "rms_norm_backward",
        functools.partial(_of_norm, epsilon, (rows, size), several, tiles),
        (scale, summed, *cotangents),
        grid=(programs,),
        in_specs=[pl.BlockSpec((wide,), lambda _: (0,)), part, part, part],
        out_specs=[part, pl.BlockSpec((None, wide), lambda i: (i, 0))],
        out_shape=[
            jax.ShapeDtypeStruct(summed.shape, summed.dtype),
            jax.ShapeDtypeStruct((programs, size), jnp.float32),
        ],
        warps=share.warps,
        stages=1,
    )
    return of_x, None if alone else of_x, jnp.sum(of_scale, axis=0).astype(scale.dtype)


_normed.defvjp(_forward, _backward)


def _share(of: str, x: jax.Array) -> Share:
    rows, size = x.shape
    asked = tuning.Asked(f"pallas {of}", x.dtype.name, (rows, size), functools.partial(space, of, size))
    return tuning.blocks("rms_norm", asked, USUAL)


def space(of: str, size: int, _: int) -> list[Share]:
    """What may be measured: what has room in registers; shared memory is for sums alone."""
    programs = (USUAL.programs,) if of == "forward" else (256, 512, 1024)
    shares = itertools.starmap(Share, itertools.product((4096, 8192, 16384), (4, 8, 16), programs))
    wide = pl.next_power_of_2(size)
    fits = lambda one: HELD[of] * max(one.numbers, wide) / (32 * one.warps) <= tuning.REGISTERS  # noqa: E731
    return list(filter(fits, shares))


def _norm(epsilon: float, shape: tuple[int, int], scale_ref: Any, *refs: Any) -> None:
    given, made = refs[: len(refs) // 2], refs[len(refs) // 2 :]
    several, wide = given[0].shape
    column = jnp.arange(wide, dtype=jnp.int32) < shape[1]
    row = pl.program_id(0) * several + jnp.arange(several, dtype=jnp.int32) < shape[0]
    here = row[:, None] & column[None, :]
    first, *others = (plgpu.load(ref, mask=here, other=0.0) for ref in given)
    summed: jax.Array = sum(others, first)
    scale = plgpu.load(scale_ref, mask=column, other=0.0).astype(jnp.float32)
    x = summed.astype(jnp.float32)
    x = x * jax.lax.rsqrt(jnp.sum(x * x, axis=1) / shape[1] + epsilon)[:, None]
    plgpu.store(made[0], (x * scale[None, :]).astype(made[0].dtype), mask=here)
    if len(made) > 1:
        plgpu.store(made[1], summed, mask=here)


def _of_norm(
    epsilon: float,
    shape: tuple[int, int],
    several: int,
    tiles: int,
    scale_ref: Any,
    summed_ref: Any,
    g_ref: Any,
    of_summed_ref: Any,
    of_x_ref: Any,
    of_scale_ref: Any,
) -> None:
    wide = summed_ref.shape[1]
    column = jnp.arange(wide, dtype=jnp.int32) < shape[1]
    scale = plgpu.load(scale_ref, mask=column, other=0.0).astype(jnp.float32)[None, :]
    first = pl.program_id(0) * several * tiles

    def step(t: jax.Array, of_scale: jax.Array) -> jax.Array:
        row = first + t * several + jnp.arange(several, dtype=jnp.int32) < shape[0]
        here, mask = (pl.ds(t * several, several), slice(None)), row[:, None] & column[None, :]
        x, g, own = (
            plgpu.load(ref.at[*here], mask=mask, other=0.0).astype(jnp.float32)
            for ref in (summed_ref, g_ref, of_summed_ref)
        )
        inverse = jax.lax.rsqrt(jnp.sum(x * x, axis=1) / shape[1] + epsilon)[:, None]
        normal, scaled = x * inverse, g * scale
        along = jnp.sum(scaled * normal, axis=1)[:, None] / shape[1]
        of_x = inverse * (scaled - normal * along) + own
        plgpu.store(of_x_ref.at[*here], of_x.astype(of_x_ref.dtype), mask=mask)
        return of_scale + jnp.sum(g * normal, axis=0)

    of_scale = jax.lax.fori_loop(0, tiles, step, jnp.zeros((wide,), jnp.float32))
    plgpu.store(of_scale_ref, of_scale, mask=column)
