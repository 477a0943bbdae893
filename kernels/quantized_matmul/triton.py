"""The matmul as Triton kernels, which dequantize codes in registers.

In the forward pass a program computes a tile of the result; at each step it reads a tile of x and a tile of codes. The
two codes of a byte are neighbours along the sum: the first codes of the bytes are multiplied with the even columns of x
and the second codes with the odd columns, in two matmuls that move no values. For this, x is copied with its even
columns first, 4 bytes per element of x; dequantizing the weight first would write and read 4 bytes per element of the
weight. In the backward pass the sum is along the outputs, and even and odd columns are separate results.

With T tokens the codes are read T / 128 times. All reads but the first are from the second-level cache, because
programs that share a tile of codes start one after the other.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmem.kernels.launch import block_size
from jaxmem.kernels.triton_launch import Launch, launch, load_programs

from . import MatmulCall, QuantizedScales

PROGRAMS = "jaxmem.kernels.quantized_matmul.triton_programs"


class TileSizes(NamedTuple):
    """Tile sizes of a program: powers of two, at least 16 for the tensor cores."""

    tokens: int
    rows: int  # rows of codes
    outputs: int
    warps: int
    stages: int


MIN_TILE = 16
USUAL = {"forward": TileSizes(128, 32, 128, 8, 3), "backward": TileSizes(128, 32, 64, 8, 3)}


@dataclass(frozen=True)
class MatmulTiling:
    """Compile-time values of a program."""

    tokens: int
    outputs: int
    code_rows: int
    blocks: int  # number of blocks (scales) along the rows
    blocks_of_group: int
    tile_tokens: int
    rows: int
    tile_outputs: int
    unit: int  # rows of codes that share a scale
    together: int  # codes per byte
    steps: int
    listed: bool
    double: bool

    @property
    def reads_each_row(self) -> bool:
        return self.rows % self.unit != 0 != self.unit % self.rows

    @property
    def blocks_of_tile(self) -> int:
        return self.rows if self.reads_each_row else max(1, self.rows // self.unit)


def multiply(call: MatmulCall, x: Float[Array, "tokens inputs"], codes: jax.Array, scale: Any) -> jax.Array:
    """x @ w, [tokens, outputs]."""
    blocks = fitting(call, x.shape[0], USUAL["forward"])
    columns = jnp.moveaxis(x.reshape(x.shape[0], codes.shape[0], call.form.together), 2, 0)
    return _run("dequant_matmul", call, blocks, columns, codes, scale)


def of_activations(call: MatmulCall, g: Float[Array, "tokens outputs"], codes: jax.Array, scale: Any) -> jax.Array:
    """g @ w.T, [tokens, inputs]."""
    result = _run("dequant_matmul_of_activations", call, fitting(call, g.shape[0], USUAL["backward"]), g, codes, scale)
    return jnp.moveaxis(result, 0, 2).reshape(g.shape[0], call.inputs)


def _run(name: str, call: MatmulCall, blocks: TileSizes, x: jax.Array, codes: jax.Array, scale: Any) -> jax.Array:
    forward, tokens, rows = name == "dequant_matmul", x.shape[-2], codes.shape[0]
    arrays, properties = weight_arrays(call, codes, scale)
    static = MatmulTiling(
        tokens=tokens, tile_tokens=blocks.tokens, rows=blocks.rows, tile_outputs=blocks.outputs, **properties
    )
    shape = (tokens, call.outputs) if forward else (call.form.together, tokens, rows)
    tiles = -(-call.outputs // blocks.outputs) if forward else -(-rows // blocks.rows)
    (result,) = launch(
        getattr(load_programs(PROGRAMS), name),
        [x, *arrays],
        [jax.ShapeDtypeStruct(shape, x.dtype)],
        Launch(
            grid=(-(-tokens // blocks.tokens), tiles),
            static=static,
            warps=blocks.warps,
            stages=blocks.stages,
            flops=2.0 * (call.inputs if forward else call.outputs),
        ),
    )
    return result


def weight_arrays(call: MatmulCall, codes: jax.Array, scale: Any) -> tuple[list[jax.Array], dict[str, Any]]:
    """The arrays of a quantized weight, or of a stack of them, and the properties of `MatmulTiling` that they
    determine."""
    form, double = call.form, isinstance(scale, QuantizedScales)
    unused = jnp.zeros((1, 1), jnp.float32)  # passed for pointers that the program does not read
    own, groups, mean = scale if double else (scale, unused, unused)
    properties = {
        "outputs": call.outputs,
        "code_rows": codes.shape[-2],
        "blocks": own.shape[-2],
        "blocks_of_group": -(-own.shape[-2] // groups.shape[-2]),
        "unit": call.unit,
        "together": form.together,
        "steps": form.steps,
        "listed": form.listed is not None,
        "double": double,
    }
    listed = unused if form.listed is None else jnp.asarray(form.listed, jnp.float32)
    return [codes, own, groups, mean, listed], properties


def fitting(call: MatmulCall, tokens: int, most: TileSizes) -> TileSizes:
    """Sizes for this call. A tile of codes is inside one block, or has a power of two of blocks, unless this leaves too
    few rows for the tensor cores."""
    together = call.form.together
    rows = block_size(most.rows, -(-call.inputs // together))
    if call.unit >= rows or call.unit & (call.unit - 1):
        even = math.gcd(rows, call.unit)
        rows = even if even >= MIN_TILE else rows
    if call.block % together:
        raise ValueError(f"dequant_matmul: block_size is {call.block}; the triton implementation needs an even number")
    if call.inputs % together:
        raise ValueError(f"dequant_matmul: x has {call.inputs} inputs; the triton implementation needs an even number")
    return most._replace(
        tokens=block_size(most.tokens, tokens), rows=rows, outputs=block_size(most.outputs, call.outputs)
    )
