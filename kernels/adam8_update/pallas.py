"""The updates as Pallas kernels, compiled by Triton: one pass over memory, each array read once and written once.

A program holds some whole blocks in registers, so a block's largest number is known before it is written. Codes become
numbers and numbers codes by arithmetic (`kernels/codes.py`): a list of 256 read by every thread would take longer than
the memory does.

Bytes a number, with a gradient of 2: Adam reads 2 + 1 + 1 and writes 2 + 1 + 1, with the constants of blocks of 256
8.06; int8 weights with an update of 2: 4.05. Instructions a number, counted
(`scripts/measure/kernel_instructions.py`): Adam 66
along columns and 69 along rows, int8 weights 21 and 26. In the time in which Adam's bytes come and go an H200 does 56,
an H100 80, a 4090 330: so they are counted, and written one by one where it matters (`kernels/instructions.py`).

Codes and constants are written where they were. On a CPU the same kernels run interpreted, for tests.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxmem.kernels import tuning
from jaxmem.kernels.codes import dynamic8_code, dynamic8_value
from jaxmem.kernels.draws import uniform
from jaxmem.kernels.instructions import (
    LARGE,
    bits,
    floats,
    fma,
    from_bits,
    large_from_bytes,
    reciprocal,
    sqrt,
    to_bytes,
)
from jaxmem.kernels.launch import launch

from .arguments import Adam, Blocks, Moments8, blocked, count, lines
from .reference import STEPS


class Share(NamedTuple):
    """What a program has."""

    numbers: int
    columns: int  # at least side by side where blocks run along the rows: 32 bytes are what memory is read in
    warps: int  # of so many numbers: where a program has to have more, it has more warps


# 32 numbers a thread: what it does once is a small part, and two programs or more share a multiprocessor, of which one
# waits for memory while another computes.
USUAL = {"adam8_update": Share(4096, 32, 4), "int8_add": Share(4096, 32, 4)}
WARPS = 32  # that a program may have
# Numbers that a thread has side by side. Along the columns as many as it reads of a gradient in one instruction: all
# arrays lie in its registers alike. Along the rows fewer, so that most of a block's largest is its own to find.
AT_ONCE = {-1: 8, -2: 4}
MOST = 16384  # numbers of a block
MOST_TIMES = 2.0**126  # by which a block is multiplied: one of zeros, too
HELD = {"adam8_update": 5, "int8_add": 3}  # registers for each number of a thread


def adam8(adam: Adam, blocks: Blocks, g: jax.Array, state: Moments8, unbiased: jax.Array) -> tuple[jax.Array, Moments8]:
    numbers = tuple(blocked(x, blocks) for x in (g, state.m, state.v))
    constants = tuple(lines(x, blocks) for x in (state.m_scale, state.v_scale))
    cut = _Cut("adam8_update", blocks, numbers[0])
    u, *new = launch(
        "adam8_update",
        functools.partial(_adam8, adam, cut),
        (*numbers, *constants, divisor(adam, unbiased)),
        grid=cut.grid,
        in_specs=[cut.numbers, cut.numbers, cut.numbers, cut.lines, cut.lines, pl.BlockSpec((2,), lambda *_: (0,))],
        out_specs=[cut.numbers, cut.numbers, cut.numbers, cut.lines, cut.lines],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (*numbers, *constants)],
        warps=cut.warps,
        stages=1,
        in_place={1: 1, 2: 2, 3: 3, 4: 4},
    )
    return u.reshape(g.shape), Moments8(*(x.reshape(old.shape) for x, old in zip(new, state, strict=True)))


def divisor(adam: Adam, unbiased: jax.Array) -> jax.Array:
    """a and b, with which m / (a * sqrt(v) + b) is the direction of an m in units of 1 - beta1 and a v of 1 - beta2."""
    root = jnp.sqrt((1 - adam.beta2) / unbiased[1])
    return jnp.stack([root, jnp.float32(adam.epsilon)]) * (unbiased[0] / (1 - adam.beta1))


def int8_add(
    blocks: Blocks, codes: jax.Array, scale: jax.Array, u: jax.Array, seeds: jax.Array
) -> tuple[jax.Array, jax.Array]:
    numbers = blocked(codes, blocks), blocked(u, blocks)
    cut = _Cut("int8_add", blocks, numbers[1])
    new, new_scale = launch(
        "int8_add",
        functools.partial(_int8_add, cut),
        (numbers[0], lines(scale, blocks), numbers[1], lines(seeds, blocks)),
        grid=cut.grid,
        in_specs=[cut.numbers, cut.lines, cut.numbers, cut.lines],
        out_specs=[cut.numbers, cut.lines],
        out_shape=[
            jax.ShapeDtypeStruct(numbers[0].shape, codes.dtype),
            jax.ShapeDtypeStruct(lines(scale, blocks).shape, scale.dtype),
        ],
        warps=cut.warps,
        stages=1,
        in_place={0: 0, 1: 1},
    )
    return new.reshape(codes.shape), new_scale.reshape(scale.shape)


def space(operation: str, along: int, _: int) -> list[Share]:
    """What may be measured: what has room in registers; shared memory is for sums alone."""
    columns = (USUAL[operation].columns,) if along == -1 else (16, 32, 64)
    shares = itertools.starmap(Share, itertools.product((2048, 4096, 8192), columns, (4, 8, 16)))
    fits = lambda one: HELD[operation] * one.numbers / (32 * one.warps) <= tuning.REGISTERS  # noqa: E731
    return list(filter(fits, shares))


class _Cut:
    """Whole blocks for each program: [some, size], or [size, some] of one row of blocks."""

    def __init__(self, operation: str, blocks: Blocks, like: jax.Array):
        shape = like.shape
        self.size, self.shape, self.dim = blocks.size, shape, 1 if blocks.along == -1 else 0
        wide = pl.next_power_of_2(blocks.size)
        if wide > MOST:
            raise ValueError(
                f"{operation}: block_size is {blocks.size}; the pallas implementation takes {MOST} at most"
            )
        kind, sizes = f"{like.dtype.name} along {blocks.along}", (count(like), blocks.size)
        asked = tuning.Asked("pallas update", kind, sizes, functools.partial(space, operation, blocks.along))
        numbers, columns, warps = tuning.blocks(operation, asked, USUAL[operation])
        if self.dim:
            self.others = max(1, numbers // wide)
            self.block: tuple[int, ...] = (self.others, wide)
            self.grid: tuple[int, ...] = (pl.cdiv(shape[0], self.others),)
            self.numbers = pl.BlockSpec((self.others, wide), lambda i: (i, 0))
            self.lines = pl.BlockSpec((self.others,), lambda i: (i,))
        else:
            self.others = min(max(columns, numbers // wide), pl.next_power_of_2(shape[2]))
            self.block = (wide, self.others)
            self.grid = (pl.cdiv(shape[2], self.others), shape[0])
            # Nothing is masked off, but the compiler sees how large a program's number can be: so that places stay
            # below 2^31 where they do, and leaves a row's distance from the first to what loads or stores it.
            most_j, most_i = (pl.next_power_of_2(size) - 1 for size in self.grid)
            self.numbers = pl.BlockSpec((None, wide, self.others), lambda j, i: (i & most_i, 0, j & most_j))
            self.lines = pl.BlockSpec((None, self.others), lambda j, i: (i, j))

        self.warps = min(WARPS, warps * max(1, math.prod(self.block) // numbers))

    def masks(self) -> tuple[jax.Array | None, jax.Array | None]:
        """Which numbers of the program's block are there, and which constants; None: all."""
        end = self.shape[0] if self.dim else self.shape[2]
        wide = self.block[self.dim]
        if self.size == wide and end % self.others == 0:
            return None, None
        inside = self.places() < self.size
        line = pl.program_id(0) * self.others + jnp.arange(self.others, dtype=jnp.int32) < end
        return inside & jnp.expand_dims(line, self.dim), line

    def numbers_of(self, ref: Any) -> Any:
        if self.dim:
            lines = jnp.arange(self.others, dtype=jnp.int32)
            return ref.at[lines[:, None], plgpu.max_contiguous(self.places(), (1, AT_ONCE[-1]))]
        columns = jnp.arange(self.others, dtype=jnp.int32)
        return ref.at[self.places(), plgpu.max_contiguous(columns, AT_ONCE[-2])[None, :]]

    def places(self) -> jax.Array:
        """Where in its block each of the program's numbers stands. Along the rows neighbours are half of the rows
        apart, which is where a thread has several: it draws for both at once."""
        wide = self.block[self.dim]
        found = jnp.arange(wide, dtype=jnp.int32)
        if not self.dim and wide > 1:
            found = found % (wide // 2) * 2 + found // (wide // 2)
        return jnp.expand_dims(found, 1 - self.dim)

    def beside(self, constants: jax.Array) -> jax.Array:
        return jnp.expand_dims(constants, self.dim)

    def largest(self, x: jax.Array, *, signed: bool = True, steps: int = 1) -> tuple[jax.Array, jax.Array]:
        """Of each block, and by what numbers are multiplied to be in -steps ... steps. Compared are bits, in whose
        order NaN is above all numbers: to a GPU's maximum of floats it is less than any."""
        most = from_bits(jnp.max(bits(jnp.abs(x) if signed else x), axis=self.dim))
        return most, jnp.minimum(steps * reciprocal(most), MOST_TIMES)


def _adam8(adam: Adam, cut: _Cut, *refs: Any) -> None:
    """With m in units of 1 - beta1 and v of 1 - beta2, so that g and its square are added as they are."""
    g_ref, m_ref, v_ref, m_scale_ref, v_scale_ref, divisor_ref, u_ref, *new_refs = refs
    g_ref, m_ref, v_ref, u_ref = (cut.numbers_of(x) for x in (g_ref, m_ref, v_ref, u_ref))
    new_refs[:2] = [cut.numbers_of(x) for x in new_refs[:2]]
    here, line = cut.masks()
    m_unit, v_unit = 1 - adam.beta1, 1 - adam.beta2
    g = floats(_load(g_ref, here, 0))
    zero = 127  # the code of zero, so that what is not there is no block's largest
    old_m = dynamic8_value(_load(m_ref, here, zero), signed=True)
    old_v = dynamic8_value(_load(v_ref, here, 0), signed=False)
    m_scale, v_scale = (_load(ref, line, 0) for ref in (m_scale_ref, v_scale_ref))
    m = fma(old_m, cut.beside(m_scale * (adam.beta1 / m_unit)), g)
    v = fma(g, g, old_v * cut.beside(v_scale * (adam.beta2 / v_unit)))
    below = fma(sqrt(v), *(jnp.full((1, 1), divisor_ref[i], jnp.float32) for i in (0, 1)))
    (m_most, m_inverse), (v_most, v_inverse) = cut.largest(m), cut.largest(v, signed=False)
    for ref, x, mask in (
        (u_ref, m * reciprocal(below), here),
        (new_refs[0], dynamic8_code(m, cut.beside(m_inverse), signed=True), here),
        (new_refs[1], dynamic8_code(v, cut.beside(v_inverse), signed=False, zero=False), here),
        (new_refs[2], m_most * m_unit, line),
        (new_refs[3], v_most * v_unit, line),
    ):
        plgpu.store(ref, x.astype(ref.dtype), mask=mask)


def _load(ref: Any, mask: jax.Array | None, other: Any) -> jax.Array:
    return plgpu.load(ref, mask=mask, other=None if mask is None else jnp.asarray(other, ref.dtype))


def _int8_add(
    cut: _Cut, codes_ref: Any, scale_ref: Any, u_ref: Any, seeds_ref: Any, new_ref: Any, new_scale_ref: Any
) -> None:
    here, line = cut.masks()
    codes_ref, u_ref, new_ref = (cut.numbers_of(x) for x in (codes_ref, u_ref, new_ref))
    scale = _load(scale_ref, line, 0) * (1.0 / STEPS)
    old = large_from_bytes(_load(codes_ref, here, 0)) - (LARGE + 128)
    w = fma(old, cut.beside(scale), floats(_load(u_ref, here, 0)))
    most, inverse = cut.largest(w, steps=STEPS)
    seeds = _load(seeds_ref, line, 0)
    draws = uniform(cut.beside(seeds), cut.places())
    steps = jnp.maximum(w * cut.beside(inverse), -STEPS)  # int8 has a number below, too
    plgpu.store(new_ref, to_bytes(steps + draws, 1, 0, jnp.int8, down=True), mask=here)
    plgpu.store(new_scale_ref, most, mask=line)
