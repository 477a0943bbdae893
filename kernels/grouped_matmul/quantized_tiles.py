"""Tiles of quantized matrices for the Triton kernels, which dequantize codes in registers.

In the forward pass a program reads, at each step, a tile of x and a tile of codes. The two codes of a byte are
neighbours along the sum: the first codes of the bytes are multiplied with the even columns of x and the second codes
with the odd columns, in two matmuls that move no values. For this, x is copied with its even columns first. In the
backward pass the sum is along the outputs, and even and odd columns are separate results.
"""

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxmem.kernels.launch import block_size
from jaxmem.kernels.quantized_matmul import MatmulCall, QuantizedScales


class TileSizes(NamedTuple):
    """Tile sizes of a program: powers of two, at least 16 for the tensor cores."""

    tokens: int
    rows: int  # rows of codes
    outputs: int
    warps: int
    stages: int


MIN_TILE = 16
FORWARD = TileSizes(64, 32, 128, 8, 3)
BACKWARD = TileSizes(64, 32, 64, 8, 3)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizedMatrices:
    """Frozen quantized matrices of all groups: the arrays of `dequant_matmul`, with a leading dimension of groups."""

    codes: Any  # an array
    scale: Any  # an array, float32 or uint8 (E8M0), or QuantizedScales
    call: MatmulCall = field(metadata={"static": True})

    def arrays(self) -> tuple[list[jax.Array], dict[str, Any]]:
        """The arrays that a program reads, and the properties of `GroupedTiling` that they determine."""
        call = self.call
        double = isinstance(self.scale, QuantizedScales)
        unused = jnp.zeros((1, 1), jnp.float32)  # passed for pointers that the program does not read
        scales, groups, mean = self.scale if double else (self.scale, unused, unused)
        properties = {
            "outputs": call.outputs,
            "code_rows": self.codes.shape[-2],
            "blocks": scales.shape[-2],
            "blocks_of_group": -(-scales.shape[-2] // groups.shape[-2]),
            "unit": call.unit,
            "together": call.form.together,
            "steps": call.form.steps,
            "listed": call.form.listed is not None,
            "double": double,
        }
        listed = unused if call.form.listed is None else jnp.asarray(call.form.listed, jnp.float32)
        return [self.codes, scales, groups, mean, listed], properties

    def tile_sizes(self, most: TileSizes) -> TileSizes:
        """Sizes up to `most`. A tile of codes is inside one block, or has a power of two of blocks, unless this leaves
        too few rows for the tensor cores."""
        call = self.call
        together = self.call.form.together
        rows = block_size(most.rows, -(-call.inputs // together))
        if call.unit >= rows or call.unit & (call.unit - 1):
            even = math.gcd(rows, call.unit)
            rows = even if even >= MIN_TILE else rows
        if call.block % together:
            raise ValueError(
                f"grouped_matmul: block_size is {call.block}; the triton implementation needs an even number"
            )
        if call.inputs % together:
            raise ValueError(
                f"grouped_matmul: x has {call.inputs} inputs; the triton implementation needs an even number"
            )
        return most._replace(rows=rows, outputs=block_size(most.outputs, call.outputs))
