"""The product as Pallas kernels, compiled by Triton: codes become numbers in registers, on their way to a product.

Forward, a program makes a tile of the result: at each step it reads a tile of x and one of codes. Where a byte holds
two values, those are neighbours along the sum, so the bytes' first values meet the even columns of x and their second
ones the odd columns: two products, and no value changes its place. For that x comes with its even columns first, which
is the one copy made: 4 bytes a number of x, where decoding the weight first writes and reads 4 bytes a number of it.
Backward the same tiles of codes, the sum along the outputs; it gives even and odd columns apart.

Bytes, with T tokens: the codes are read T / 128 times, all but the first from the second-level cache, as programs that
share a tile of codes start one after the other. Nothing is held beside the result but that copy.

On a CPU the same kernels run interpreted, for tests.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float

from jaxmem.kernels import tuning
from jaxmem.kernels.codes import dynamic8_value
from jaxmem.kernels.launch import launch, up_to

from .arguments import Call, Constants


class Blocks(NamedTuple):
    """How a kernel is cut: powers of two, at least 16 for the tensor cores."""

    tokens: int
    rows: int  # of codes
    outputs: int
    warps: int
    stages: int


LEAST = 16
USUAL = {"forward": Blocks(128, 32, 128, 8, 3), "backward": Blocks(128, 32, 64, 8, 3)}


def multiply(
    call: Call,
    x: Float[Array, "tokens inputs"],
    codes: jax.Array,
    scale: Any,
) -> Float[Array, "tokens outputs"]:
    blocks = _blocks("forward", call, x)
    (tokens, _), together, rows = x.shape, call.form.together, codes.shape[0]
    columns = jnp.moveaxis(x.reshape(tokens, rows, together), 2, 0)
    beside = _beside(call, scale)
    (made,) = launch(
        "dequant_matmul",
        functools.partial(_forward, call, blocks, tokens, rows),
        (columns, codes, *beside),
        grid=(pl.cdiv(tokens, blocks.tokens), pl.cdiv(call.outputs, blocks.outputs)),
        in_specs=[
            pl.BlockSpec((together, blocks.tokens, rows), lambda i, _: (0, i, 0)),
            pl.BlockSpec((rows, blocks.outputs), lambda _, j: (0, j)),
            *(_spec(a, blocks.outputs, lambda _, j: j) for a in beside),
        ],
        out_specs=[pl.BlockSpec((blocks.tokens, blocks.outputs), lambda i, j: (i, j))],
        out_shape=[jax.ShapeDtypeStruct((tokens, call.outputs), x.dtype)],
        warps=blocks.warps,
        stages=blocks.stages,
        flops=2.0 * call.inputs,
    )
    return made


def of_activations(
    call: Call,
    g: Float[Array, "tokens outputs"],
    codes: jax.Array,
    scale: Any,
) -> Float[Array, "tokens inputs"]:
    blocks = _blocks("backward", call, g)
    (tokens, _), together, rows = g.shape, call.form.together, codes.shape[0]
    beside = _beside(call, scale)
    (made,) = launch(
        "dequant_matmul_of_activations",
        functools.partial(_backward, call, blocks, tokens, rows),
        (g, codes, *beside),
        grid=(pl.cdiv(tokens, blocks.tokens), pl.cdiv(rows, blocks.rows)),
        in_specs=[
            pl.BlockSpec((blocks.tokens, call.outputs), lambda i, _: (i, 0)),
            pl.BlockSpec((blocks.rows, call.outputs), lambda _, j: (j, 0)),
            *(_spec(a, call.outputs, lambda *_: 0) for a in beside),
        ],
        out_specs=[pl.BlockSpec((together, blocks.tokens, blocks.rows), lambda i, j: (0, i, j))],
        out_shape=[jax.ShapeDtypeStruct((together, tokens, rows), g.dtype)],
        warps=blocks.warps,
        stages=blocks.stages,
        flops=2.0 * call.outputs,
    )
    return jnp.moveaxis(made, 0, 2).reshape(tokens, call.inputs)


# ---------------------------------------------------------------- the programs


def _forward(call: Call, blocks: Blocks, tokens: int, rows: int, x_ref: Any, codes_ref: Any, *rest: Any) -> None:
    *beside, out_ref = rest
    token, output = _places(0, blocks.tokens, tokens), _places(1, blocks.outputs, call.outputs)

    def step(t: jax.Array, total: jax.Array) -> jax.Array:
        here, row = (
            pl.ds(t * blocks.rows, blocks.rows),
            t * blocks.rows + jnp.arange(blocks.rows, dtype=jnp.int32) < rows,
        )
        weights = _decoded(call, blocks, codes_ref, beside, t, (here, pl.ds(0, blocks.outputs)), row, output)
        for p, w in enumerate(weights):
            x = plgpu.load(x_ref.at[jnp.int32(p), :, here], mask=token[:, None] & row[None, :], other=0.0)
            total += _dot(x, w.astype(x.dtype))
        return total

    start = jnp.zeros((blocks.tokens, blocks.outputs), jnp.float32)
    total = jax.lax.fori_loop(0, pl.cdiv(rows, blocks.rows), step, start)
    plgpu.store(out_ref, total.astype(out_ref.dtype), mask=token[:, None] & output[None, :])


def _backward(call: Call, blocks: Blocks, tokens: int, rows: int, g_ref: Any, codes_ref: Any, *rest: Any) -> None:
    *beside, out_ref = rest
    token, row, at = _places(0, blocks.tokens, tokens), _places(1, blocks.rows, rows), pl.program_id(1)

    def step(j: jax.Array, totals: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        here = pl.ds(j * blocks.outputs, blocks.outputs)
        output = j * blocks.outputs + jnp.arange(blocks.outputs, dtype=jnp.int32) < call.outputs
        g = plgpu.load(g_ref.at[:, here], mask=token[:, None] & output[None, :], other=0.0)
        weights = _decoded(call, blocks, codes_ref, beside, at, (pl.ds(0, blocks.rows), here), row, output)
        return tuple(total + _dot(g, w.astype(g.dtype), True) for total, w in zip(totals, weights, strict=True))

    start = (jnp.zeros((blocks.tokens, blocks.rows), jnp.float32),) * call.form.together
    totals = jax.lax.fori_loop(0, pl.cdiv(call.outputs, blocks.outputs), step, start)
    for p, total in enumerate(totals):
        plgpu.store(out_ref.at[jnp.int32(p), :, :], total.astype(out_ref.dtype), mask=token[:, None] & row[None, :])


def _blocks(of: str, call: Call, x: jax.Array) -> Blocks:
    room = functools.partial(space, of, call.form.together, x.dtype.itemsize)
    sizes = x.shape[0], call.inputs, call.outputs
    asked = tuning.Asked(f"pallas {of}", f"{call.form.bits} bits {x.dtype.name}", sizes, room)
    return _fitting(call, x.shape[0], tuning.blocks("dequant_matmul", asked, USUAL[of]))


def space(of: str, together: int, itemsize: int, shared: int) -> list[Blocks]:
    """What may be measured: what has room in shared memory and in registers. Tiles of the weight pass through both."""

    def fits(blocks: Blocks) -> bool:
        tokens, rows, outputs, warps, stages = blocks
        weight = together * rows * outputs
        given, made = (together * rows, outputs) if of == "forward" else (outputs, together * rows)
        held = stages * (tokens * given * itemsize + rows * outputs) + weight * itemsize
        return held <= shared and 32 <= (tokens * made + weight) / (32 * warps) <= tuning.REGISTERS

    sizes = itertools.product((64, 128), (32, 64), (64, 128, 256), (4, 8), (2, 3))
    return [blocks for blocks in itertools.starmap(Blocks, sizes) if fits(blocks)]


def _fitting(call: Call, tokens: int, most: Blocks) -> Blocks:
    """A tile of codes lies in one block of constants, or has a power of two of them."""
    rows = up_to(most.rows, -(-call.inputs // call.form.together))
    if call.unit >= rows or call.unit & (call.unit - 1):
        rows = math.gcd(rows, call.unit)
    if call.block % call.form.together or rows < LEAST:
        least = LEAST * call.form.together
        raise ValueError(
            f"dequant_matmul: block_size is {call.block}; the pallas implementation takes powers of two and multiples"
            f" of {least}"
        )
    if call.inputs % call.form.together:
        raise ValueError(f"dequant_matmul: x has {call.inputs} inputs; the pallas implementation takes even numbers")
    return most._replace(tokens=up_to(most.tokens, tokens), rows=rows, outputs=up_to(most.outputs, call.outputs))


def _beside(call: Call, scale: Any) -> tuple[jax.Array, ...]:
    """What a tile of codes is decoded with."""
    constants = (scale.codes, scale.scale, scale.mean.reshape(())) if isinstance(scale, Constants) else (scale,)
    return constants if call.form.listed is None else (*constants, jnp.asarray(call.form.listed, jnp.float32))


def _spec(a: jax.Array, width: int, column: Callable[..., Any]) -> pl.BlockSpec:
    """So many columns of constants; all of what is not for each output."""
    if a.ndim < 2:
        return pl.BlockSpec(a.shape, lambda *_: (0,) * a.ndim)
    return pl.BlockSpec((a.shape[0], width), lambda *at: (0, column(*at)))


def _decoded(
    call: Call,
    blocks: Blocks,
    codes_ref: Any,
    beside: list[Any],
    tile: jax.Array,  # which rows of codes, in tiles
    where: tuple[Any, Any],  # the tile in its reference
    row: jax.Array,
    output: jax.Array,
) -> list[jax.Array]:
    """Of a tile of codes the values in each place of a byte, in float32. Rows and columns beyond the weight's end give
    some finite number."""
    form = call.form
    codes = plgpu.load(codes_ref.at[*where], mask=row[:, None] & output[None, :], other=0).astype(jnp.int32)
    *constants, listed = beside if form.listed is not None else (*beside, None)
    own = _constants(call, blocks, constants, tile, where[1], output)
    if form.bits == 8:
        return [codes.astype(jnp.float32) * (own * (1.0 / form.steps))]
    places = [(codes >> 4) & 15, codes & 15]
    if listed is not None:
        return [plgpu.load(listed.at[place]) * own for place in places]
    return [(place - form.steps).astype(jnp.float32) * (own * (1.0 / form.steps)) for place in places]


def _constants(
    call: Call, blocks: Blocks, refs: list[Any], tile: jax.Array, columns: Any, output: jax.Array
) -> jax.Array:
    """[1 or rows, outputs]: a tile lies in one block, or holds several."""
    several = max(1, blocks.rows // call.unit)
    count = -(-call.inputs // call.block)
    first = jax.lax.div(tile * blocks.rows, jnp.int32(call.unit))
    block = first + jnp.arange(several, dtype=jnp.int32)
    real = (block < count)[:, None] & output[None, :]
    own = plgpu.load(refs[0].at[pl.ds(first, several), columns], mask=real, other=0)
    if len(refs) > 1:
        _, scale, mean = refs
        group = jax.lax.div(jnp.minimum(block, count - 1), jnp.int32(-(-count // scale.shape[0])))
        column = columns.start + jnp.arange(columns.size, dtype=jnp.int32)
        places = jnp.broadcast_arrays(group[:, None], column[None, :])
        of_group = plgpu.load(scale.at[*places], mask=real, other=0.0)
        own = dynamic8_value(own, signed=True) * of_group + plgpu.load(mean)
    if several == 1:
        return own
    wide = jnp.broadcast_to(own[:, None, :], (several, call.unit, own.shape[1]))
    return wide.reshape(several * call.unit, own.shape[1])


def _places(dim: int, block: int, size: int) -> jax.Array:
    """Which of this program's rows, or columns, are there."""
    return pl.program_id(dim) * block + jnp.arange(block, dtype=jnp.int32) < size


def _dot(a: jax.Array, b: jax.Array, trans_b: bool = False) -> jax.Array:
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return plgpu.dot(a, b, trans_b=trans_b, precision=precision).astype(jnp.float32)
