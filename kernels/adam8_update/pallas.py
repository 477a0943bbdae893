"""The updates as Pallas kernels, compiled by Triton: one pass over memory, each array read once and written once.

A program holds some whole blocks in registers, so a block's largest number is known before it is written. Codes become
numbers and numbers codes by arithmetic (`kernels/codes.py`): a list of 256 read by every thread would take longer than
the memory does.

Bytes a number, with a gradient of 2: Adam reads 2 + 1 + 1 and writes 2 + 1 + 1, with the constants of blocks of 256
8.06; int8 weights with an update of 2: 4.05. Operations a number, of Adam: some 25 to decode, 12 to step, 45 to encode.
In the time in which 8 bytes come and go an H200 does 55, an H100 75, a 4090 310: large cards wait for arithmetic.

Codes and constants are written where they were. On a CPU the same kernels run interpreted, for tests.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxmem.kernels import tuning
from jaxmem.kernels.codes import dynamic8_code, dynamic8_value
from jaxmem.kernels.draws import uniform
from jaxmem.kernels.launch import launch

from .arguments import Adam, Blocks, Moments8, blocked, count, lines
from .reference import STEPS


class Share(NamedTuple):
    """What a program has."""

    numbers: int
    columns: int  # at least side by side where blocks run along the rows: a sector of memory of codes, or several
    warps: int


USUAL = Share(4096, 32, 8)
MOST = 16384  # numbers of a block
HELD = {"adam8_update": 8, "int8_add": 4}  # registers for each number of a thread


def adam8(adam: Adam, blocks: Blocks, g: jax.Array, state: Moments8, unbiased: jax.Array) -> tuple[jax.Array, Moments8]:
    numbers = tuple(blocked(x, blocks) for x in (g, state.m, state.v))
    constants = tuple(lines(x, blocks) for x in (state.m_scale, state.v_scale))
    cut = _Cut("adam8_update", blocks, numbers[0])
    u, *new = launch(
        "adam8_update",
        functools.partial(_adam8, adam, cut),
        (*numbers, *constants, unbiased),
        grid=cut.grid,
        in_specs=[cut.numbers, cut.numbers, cut.numbers, cut.lines, cut.lines, pl.BlockSpec((2,), lambda *_: (0,))],
        out_specs=[cut.numbers, cut.numbers, cut.numbers, cut.lines, cut.lines],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (*numbers, *constants)],
        warps=cut.warps,
        stages=1,
        in_place={1: 1, 2: 2, 3: 3, 4: 4},
    )
    return u.reshape(g.shape), Moments8(*(x.reshape(old.shape) for x, old in zip(new, state, strict=True)))


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
    columns = (USUAL.columns,) if along == -1 else (32, 64)
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
        numbers, columns, self.warps = tuning.blocks(operation, asked, USUAL)
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
            self.numbers = pl.BlockSpec((None, wide, self.others), lambda j, i: (i, 0, j))
            self.lines = pl.BlockSpec((None, self.others), lambda j, i: (i, j))

    def masks(self) -> tuple[jax.Array, jax.Array]:
        """Which numbers of the program's block are there, and which constants."""
        inside = jnp.arange(self.block[self.dim], dtype=jnp.int32) < self.size
        end = self.shape[0] if self.dim else self.shape[2]
        line = pl.program_id(0) * self.others + jnp.arange(self.others, dtype=jnp.int32) < end
        return jnp.expand_dims(inside, 1 - self.dim) & jnp.expand_dims(line, self.dim), line

    def places(self) -> jax.Array:
        """Where in its block each of the program's numbers stands."""
        return jnp.expand_dims(jnp.arange(self.block[self.dim], dtype=jnp.int32), 1 - self.dim)

    def beside(self, constants: jax.Array) -> jax.Array:
        return jnp.expand_dims(constants, self.dim)

    def largest(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Of each block, and by what numbers are multiplied to be in -1 ... 1."""
        most = jnp.max(jnp.abs(x), axis=self.dim)
        return most, jnp.where(most > 0, 1.0 / jnp.where(most > 0, most, 1.0), 0.0)


def _adam8(adam: Adam, cut: _Cut, *refs: Any) -> None:
    g_ref, m_ref, v_ref, m_scale_ref, v_scale_ref, unbiased_ref, u_ref, *new_refs = refs
    here, line = cut.masks()
    g = plgpu.load(g_ref, mask=here, other=0).astype(jnp.float32)
    zero = 127  # the code of zero, so that what is not there is no block's largest
    old_m = dynamic8_value(plgpu.load(m_ref, mask=here, other=zero), signed=True)
    old_v = dynamic8_value(plgpu.load(v_ref, mask=here, other=0), signed=False)
    m_scale, v_scale = (plgpu.load(ref, mask=line, other=0.0) for ref in (m_scale_ref, v_scale_ref))
    m = adam.beta1 * (old_m * cut.beside(m_scale)) + (1 - adam.beta1) * g
    v = adam.beta2 * (old_v * cut.beside(v_scale)) + (1 - adam.beta2) * g * g
    unbiased_m, unbiased_v = unbiased_ref[0], unbiased_ref[1]
    u = m / unbiased_m / (jnp.sqrt(v / unbiased_v) + adam.epsilon)
    (m_most, m_inverse), (v_most, v_inverse) = cut.largest(m), cut.largest(v)
    m_codes = dynamic8_code(m * cut.beside(m_inverse), signed=True)
    v_codes = jnp.maximum(dynamic8_code(v * cut.beside(v_inverse), signed=False), 1)
    for ref, x, mask in (
        (u_ref, u, here),
        (new_refs[0], m_codes, here),
        (new_refs[1], v_codes, here),
        (new_refs[2], m_most, line),
        (new_refs[3], v_most, line),
    ):
        plgpu.store(ref, x.astype(ref.dtype), mask=mask)


def _int8_add(
    cut: _Cut, codes_ref: Any, scale_ref: Any, u_ref: Any, seeds_ref: Any, new_ref: Any, new_scale_ref: Any
) -> None:
    here, line = cut.masks()
    scale = plgpu.load(scale_ref, mask=line, other=0.0) * (1.0 / STEPS)
    old = plgpu.load(codes_ref, mask=here, other=0).astype(jnp.float32) * cut.beside(scale)
    w = old + plgpu.load(u_ref, mask=here, other=0).astype(jnp.float32)
    most, inverse = cut.largest(w)
    seeds = plgpu.load(seeds_ref, mask=line, other=jnp.uint32(0))
    draws = uniform(cut.beside(seeds), cut.places())
    codes = jnp.clip(jnp.floor(w * cut.beside(inverse) * STEPS + draws), -STEPS, STEPS)
    plgpu.store(new_ref, codes.astype(jnp.int32).astype(new_ref.dtype), mask=here)
    plgpu.store(new_scale_ref, most, mask=line)
